"""Wherever an answer is cut, its calls and its text are the same, and text does not wait without a reason."""

from __future__ import annotations

import json
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.text.calls.format import CallFormat, Head, Verdict
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.calls.objects import MOST_BEGUN
from jdisagg.text.calls.reader import MOST_HELD, Argued, Called, CallReader, Piece, Said
from tests.unit.text.calls.rig import NAMES, joined, read
from tests.unit.text.calls.test_formats import CALLS, TEXTS

CUTS = st.lists(st.integers(0, 300))
PARTS = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ";"),
            *(",", " ", "\n", '"', "\\", "f", "g", "x <", "<tool_c", '{"name": "f", "arguments": {', '"id": "a"', '{"a": 1}'),
            *('{"name": "f", "parameters": {}}', '{"arguments": {"b": {}}, "name": "f"}', '{"name": "g", "arguments": {}}'),
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(PARTS, CUTS, st.booleans())
def test_calls_and_text_are_the_same_wherever_the_answer_is_cut(name: str, text: str, cuts: list[int], hides: bool) -> None:
    hidden = (*FORMATS[name].marks, *FORMATS[name].inner) if hides else ()
    whole = read(name, text, hidden=hidden)
    assert read(name, text, cuts, hidden) == whole
    assert read(name, text, range(len(text)), hidden) == whole
    if not whole[1] and not hides:
        assert whole[0] == text


class EachCharacter:
    """A format that is asked after each of them."""

    def __init__(self, of: CallFormat) -> None:
        self.marks, self.inner, self.glue, self.opens_bare = of.marks, of.inner, of.glue, of.opens_bare
        self._look = of.look

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """As the other's."""
        verdict = self._look(held, is_whole=is_whole)
        return Verdict.WAIT if verdict is Verdict.REST else verdict


@pytest.mark.parametrize("name", FORMATS)
@given(st.tuples(PARTS, PARTS, PARTS), st.integers(400, 20_000), st.sampled_from('a{}"]>\\ '), CUTS)
def test_a_long_head_is_read_as_if_each_of_its_characters_might_decide(
    name: str, parts: tuple[str, str, str], length: int, filling: str, cuts: list[int]
) -> None:
    before, head, behind = parts
    begun = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3_json": "<|python_tag|>"}[name]
    text = f'{before}{begun}{{"arguments": {{"a": "{head}{filling * length}{behind}"}}, "name": "f"}}{behind}'
    edges = [0, *sorted(min(length + cut, len(text)) for cut in cuts), len(text)]
    pieces, expected = list[list[Piece]](), list[list[Piece]]()
    for call_format, into in ((FORMATS[name], pieces), (EachCharacter(FORMATS[name]), expected)):
        reader = CallReader(call_format, NAMES)
        into += [reader.push(text[begin:end]) for begin, end in pairwise(edges)]
        into.append(reader.flush())
    assert pieces == expected


@pytest.mark.parametrize("over", range(-1, 3))
@pytest.mark.parametrize("cut", [3000, MOST_HELD - 5])
def test_a_long_head_may_have_so_many_characters_wherever_it_is_cut(over: int, cut: int) -> None:
    begin, end = '<tool_call>{"arguments": {"a": "', '"}, "name": "f"}'
    text = begin + "a" * (MOST_HELD + over - len(begin) - len(end)) + end
    assert len(read("hermes", text, [cut])[1]) == (over <= 0)
    assert read("hermes", text, [cut])[0] == (text if over > 0 else "")


@pytest.mark.parametrize("at", range(13))
def test_a_mark_ends_a_long_head_wherever_it_is_cut(at: int) -> None:
    text = '<tool_call>{"arguments": {"a": "' + "a" * 2000
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert read("hermes", text + call, [len(text) + at]) == (text, [("f", "{}")])
    assert read("hermes", f'{text}</tool_call>"}}, "name": "f"}}', [len(text) + at])[1] == []


def test_a_call_whose_arguments_come_first_is_read_without_a_look_after_each_character() -> None:
    looks = list[int]()

    class Counted(EachCharacter):
        def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
            looks.append(len(held))
            return self._look(held, is_whole=is_whole)

    text = '<tool_call>{"arguments": {"a": "' + "{a]>" * 4000 + '"}, "name": "f"}'
    pieces = CallReader(Counted(FORMATS["hermes"]), NAMES).push(text)
    assert joined(pieces) == ("", [("f", json.dumps({"a": "{a]>" * 4000}))])
    assert len(looks) < 600


@given(st.sampled_from([(name, text) for name, text, _ in CALLS] + TEXTS), CUTS)
def test_answers_of_models_are_the_same_wherever_they_are_cut(answer: tuple[str, str], cuts: list[int]) -> None:
    assert read(*answer, cuts) == read(*answer)


def test_text_goes_out_at_once_but_for_what_may_begin_a_call() -> None:
    reader = CallReader(FORMATS["hermes"], NAMES)
    assert reader.push("Look: ") == [Said("Look:")]
    assert reader.push("a <") == [Said(" a")]
    assert reader.push("b <tool_call") == [Said(" <b")]
    assert reader.push('>{"x') == []
    assert reader.push('"') == [Said(" <tool_call>"), Said('{"x"')]


def test_arguments_go_out_as_they_come() -> None:
    reader = CallReader(FORMATS["hermes"], NAMES)
    assert reader.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert reader.push('{"a') == [Called("f"), Argued('{"a')]
    assert reader.push('": "}') == [Argued('": "}')]
    assert reader.is_in_call
    assert reader.push('"}}\n') == [Argued('"}')]
    assert not reader.is_in_call
    assert reader.push("</tool_call>\n") == []
    assert reader.flush() == []


def test_arguments_go_out_as_they_come_whatever_stands_before_them() -> None:
    heads = {
        "llama3_json": '{"type": "function", "name": "f", "parameters": {',
        "mistral": '[TOOL_CALLS] [ {"name" :"f", "arguments": {',
        "hermes": '<tool_call>{\n "name": "f",\n "arguments": {',
    }
    for name, head in heads.items():
        assert CallReader(FORMATS[name], NAMES).push(f'{head}"a') == [Called("f"), Argued('{"a')]


def test_what_can_no_longer_become_a_call_goes_out() -> None:
    assert CallReader(FORMATS["mistral"], NAMES).push("[TOOL_CALLS]f oo") == [Said("[TOOL_CALLS]"), Said("f oo")]
    assert CallReader(FORMATS["llama3_json"], NAMES).push('{"x"') == [Said("{"), Said('"x"')]
    for begun, most in (('{"arguments": {"a": "', MOST_HELD - len("<tool_call>")), ('{"name": "', MOST_BEGUN)):
        held = "<tool_call>" + begun + "a" * (most - len(begun))
        reader = CallReader(FORMATS["hermes"], NAMES)
        assert reader.push(held) == []
        assert joined(reader.push("a")) == (held + "a", [])


def test_many_blanks_are_not_held_back() -> None:
    text = "a" + " " * 1000
    assert read("hermes", text) == (text, [])
    said, calls = read("hermes", f'{text}<tool_call>{{"name": "f", "arguments": {{}}}}', range(1100))
    assert len(said) == 1001 - 64
    assert calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "\n"),
        ("hermes", '<tool_call>{"arguments": {"a": [' + "{}," * 5000),
        ("hermes", "<tool_call>" + " " * 16300),
        ("hermes", "<tool_call>{" + " " * 16300),
        ("hermes", '<tool_call>{"name": "' + "{" * 16300),
        ("llama3_json", "<|python_tag|>" + " " * 16300),
        ("mistral", "[TOOL_CALLS][{"),
        ("mistral", '[TOOL_CALLS][{"name": "' + "{" * 16300),
        ("mistral", "[TOOL_CALLS]" + "f" * 9000),
    ],
)
def test_an_answer_that_repeats_itself_takes_no_time(name: str, unit: str) -> None:
    text = unit * (500_000 // len(unit))
    begin_s = process_time()
    assert read(name, text) == (text, [])
    assert process_time() - begin_s < 10, (
        "half a megabyte copied for each mark, or read anew after each character, takes longer"
    )
