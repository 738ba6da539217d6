"""What each format takes for a call, and what it leaves text."""

from __future__ import annotations

import pytest

from jdisagg.core.flags import BY_NAME
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.calls.reader import MOST_HELD
from tests.unit.text.calls.rig import Read, read

ARGUMENTS = '{"a": "}{\\"<", "b": {"c": []}}'
F, EMPTY = ("f", ARGUMENTS), ("get-2", "{}")
OBJECT = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
NAME_LAST = '{"arguments": {}, "name": "get-2"}'
ODD = r'{"a": "xxx\\"}'  # a piece of seven ends behind the backslash that escapes the other
CALLS: list[tuple[str, str, Read]] = [
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", ("", [F])),
    ("hermes", f"<tool_call>{OBJECT}</tool_call>", ("", [F])),
    ("hermes", f"Let me look.\n\n<tool_call>\n{OBJECT}\n</tool_call>\n", ("Let me look.", [F])),
    (
        "hermes",
        f'<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{{"name":"get-2","arguments":{{}}}}\n</tool_call>',
        ("", [F, EMPTY]),
    ),
    ("hermes", '<tool_call>\n{"arguments": {}, "name": "get-2"}\n</tool_call>', ("", [EMPTY])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "more": [{"}": 1}]}</tool_call>', ("", [("f", "{}")])),
    ("hermes", f"<tool_call>\n{OBJECT[:-1]}\n</tool_call>", ("", [F])),  # small ones forget the last brace
    ("hermes", f"<tool_call>\n{OBJECT}", ("", [F])),
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool", ("", [F])),
    ("hermes", f"<tool_call>{OBJECT}</tool_call>\nDone. ", ("\nDone. ", [F])),
    ("hermes", f"<tool_call>{OBJECT[:-6]}", ("", [("f", ARGUMENTS[:-5])])),  # cut off by `max_tokens`
    ("hermes", '<tool_call>{"name": "f", "arguments": {no JSON}}</tool_call>', ("", [("f", "{no JSON}")])),
    ("hermes", f"<tool_call> no <tool_call>{OBJECT}</tool_call>", ("<tool_call> no", [F])),
    ("hermes", f'<tool_call>\n{{"name": "f"\n<tool_call>{OBJECT}', ('<tool_call>\n{"name": "f"', [F])),
    ("llama3_json", '{"name": "get-2", "parameters": {}}', ("", [EMPTY])),
    ("llama3_json", f"\n{OBJECT}", ("", [F])),
    ("llama3_json", f"<|python_tag|>{OBJECT}", ("", [F])),
    ("llama3_json", f"\n<|python_tag|> {OBJECT}", ("", [F])),
    ("llama3_json", f'{{"type": "function", "name": "get-2", "parameters": {{}}}}; {OBJECT}', ("", [EMPTY, F])),
    ("llama3_json", f"{OBJECT} and", (" and", [F])),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}]", ("", [F])),
    ("mistral", f'[TOOL_CALLS][{OBJECT}, {{"name": "get-2", "arguments": {{}}, "id": "abcdefghi"}}]', ("", [F, EMPTY])),
    ("mistral", f'[TOOL_CALLS] [{OBJECT[:-1]}, "id": "abc"}}, {OBJECT}]', ("", [F, F])),
    ("mistral", f"Hi [TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get-2[CALL_ID]a1[ARGS]{{}}", ("Hi", [F, EMPTY])),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}", ("", [F])),
    ("mistral", "Hi \n[TOOL_CALLS]get-2{} you", ("Hi you", [EMPTY])),
    ("mistral", "[TOOL_CALLS]get-2{}}", ("}", [EMPTY])),
    ("mistral", f"[TOOL_CALLS][{NAME_LAST}, {NAME_LAST.replace('{}', '{ }')}]", ("", [EMPTY, EMPTY])),
    ("llama3_json", f"{NAME_LAST};{NAME_LAST}", ("", [EMPTY, EMPTY])),
    ("llama3_json", f"{NAME_LAST}}}", ("}", [EMPTY])),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> \n\tDone.", (" \n\tDone.", [F])),
    ("hermes", f"<tool_call>{OBJECT[:-1]} oops", (" oops", [F])),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {ODD}}}</tool_call>', ("", [("f", ODD)])),
    ("hermes", '<tool_call>{"arguments": {}, "name": "get-2"}} </tool_call>', ("} </tool_call>", [EMPTY])),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> {OBJECT}", (f" {OBJECT}", [F])),
    *(
        ("hermes", f'<tool_call>{{ "id": 1 , "arguments" : {written} ,"name":"f"}}</tool_call>', ("", [("f", shown)]))
        for written, shown in ((r'{"x": "\ud800"}', r'{"x": "\ud800"}'), ('{"x" :1.50, "x":2 }', '{"x": 2}'), ("{ }", "{}"))
    ),
]
TEXTS = [
    ("hermes", "4 < 5 <tool"),
    ("hermes", OBJECT),
    ("hermes", "\n"),
    ("hermes", 'Write <tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>  so.\n'),  # g is not offered
    ("hermes", "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f", "x": "' + "a" * MOST_HELD + '"}'),
    ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("hermes", '<tool_call>{"type":' + "[" * 5000 + "}"),
    ("hermes", '<tool_call>{"arguments": {"x": 1e999}, "name": "f"}'),  # whose arguments cannot be written again
    ("llama3_json", f"Call {OBJECT}"),
    ("llama3_json", '  {"city": "Oslo", "name": "f", "parameters": {}} '),
    ("llama3_json", '{"name": "Alice", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "age": 3}'),
    ("llama3_json", '<|python_tag|>f.call(query="x")'),
    ("llama3_json", "<|python"),
    ("llama3_json", "{}"),
    ("llama3_json", " \n\t fox"),
    ("mistral", f"[{OBJECT}]"),
    ("mistral", f"[TOOL_CALLS]g[ARGS]{ARGUMENTS}"),
    ("mistral", "[TOOL_CALLS]f oo[ARGS]"),
    ("mistral", "see [ARGS] and [TOOL"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]" + "a" * 256 + "[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f" + "[AAAA" * 40 + "!"),  # marks without end that can be taken apart in many ways
    ("mistral", ("[TOOL_CALLS]" + " " * 255 + "!") * 20),
]


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize(("name", "text", "wanted"), CALLS)
def test_calls_are_told_from_text(name: str, text: str, wanted: Read, piece: int) -> None:
    assert read(name, text, range(0, len(text), piece)) == wanted


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_comes_through_unchanged(name: str, text: str, piece: int) -> None:
    assert read(name, text, range(0, len(text), piece)) == (text, [])


def test_marks_that_are_no_text_are_not_shown_where_nothing_is_called() -> None:
    assert read("llama3_json", "<|python_tag|>1 + 1", hidden={"<|python_tag|>"}) == ("1 + 1", [])
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert read("mistral", "a [TOOL_CALLS]g[ARGS]{} [ARGS]b[TOOL_CALLS]f[ARGS", hidden=marks) == ("a g{} bf[ARGS", [])
    assert read("mistral", "a [TOOL_CALLS]f[CALL_ID]", hidden=marks) == ("a f", [])


def test_the_flag_offers_every_format() -> None:
    assert BY_NAME["tool_call_parser"].choices == ("auto", "none", *FORMATS)
