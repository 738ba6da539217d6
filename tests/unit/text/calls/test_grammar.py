"""The grammar of an answer by a schema or calls in a model's format: what may be written, and that it is read as calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.calls.grammar import answer_or_calls
from jdisagg.text.calls.reader import Argued, Called, CallReader
from jdisagg.text.grammar import Grammars, schema_in_lark
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import advanced, allowed, lark, vocabulary, walk
from tests.unit.text.tiny_tokenizer import train_byte_level

EOS = (1,)
NAMES = ("weather", "weather-2", "odd näme!")
# Of one object with a call's in the beginning: which of both it is shows late.
SCHEMA = {
    "type": "object",
    "description": "} // </tool_call>",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer"}},
}
ANSWER = '{"name": "weather", "age": 3}'
ARGUMENTS = '{"city": "K}\\"{", "of": [{"é": null}]}'
INDENTED = json.dumps({"name": "weather", "arguments": {"city": {"of": [1]}}}, indent=4)


def called(name: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {ARGUMENTS}}}'


def hermes(name: str) -> str:
    return f"<tool_call>\n{called(name)}\n</tool_call>"


def llama(name: str) -> str:
    return called(name, "parameters")


def mistral(name: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{ARGUMENTS}"


WHOLE = {
    "hermes": [
        hermes("weather"),
        f"{hermes('weather-2')}\n{hermes(NAMES[2])}",
        f"<tool_call>{INDENTED}</tool_call>",
        '<tool_call>{"type": "function", "name": "weather", "arguments": {}}</tool_call>',
    ],
    "llama3_json": [
        llama("weather"),
        f"{llama('weather-2')}; {llama(NAMES[2])}",
        f"<|python_tag|>{llama('weather')}",
        '{"type": "function", "name": "weather", "parameters": {}}',
    ],
    "mistral": [
        f"[TOOL_CALLS][{called('weather')}]",
        f"[TOOL_CALLS] [{called('weather')}, {called(NAMES[2])}]",
        mistral("weather"),
        mistral("weather-2") + mistral("weather"),
        f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]weather{ARGUMENTS}",
    ],
}
SEVERAL = {"hermes": WHOLE["hermes"][1], "llama3_json": WHOLE["llama3_json"][1], "mistral": WHOLE["mistral"][3]}
REFUSED = {
    "hermes": [
        hermes("other"),
        f"{ANSWER}{hermes('weather')}",
        f"{hermes('weather')}{ANSWER}",
        f"So: {hermes('weather')}",
        f"<tool_call>{ANSWER}</tool_call>",
    ],
    "llama3_json": [
        llama("other"),
        f"{ANSWER};{llama('weather')}",
        f"{llama('weather')};{ANSWER}",
        f"So: {llama('weather')}",
        f"<|python_tag|>{ANSWER}",
    ],
    "mistral": [
        f"[TOOL_CALLS][{called('other')}]",
        mistral("other"),
        mistral("weather-"),
        f"{ANSWER}{mistral('weather')}",
        f"{mistral('weather')}{ANSWER}",
        f"So: {mistral('weather')}",
        f"[TOOL_CALLS]{ANSWER}",
    ],
}


@pytest.fixture(scope="module", params=["letters", "tokens", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = train_byte_level(tmp_path_factory.mktemp("marks"))
    marks = [mark for one in FORMATS.values() for mark in (*one.marks, *one.inner)]
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    if request.param == "tokens":  # which are no special ones, as Qwen's
        backend.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    elif request.param == "special":
        backend.add_special_tokens(marks)
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(vocabulary(tokenizer, EOS))


def grammar_of(tokenizer: Tokenizer, name: str, schema: Any = SCHEMA, *, in_parallel: bool = True) -> str:
    answer = json.dumps(schema_in_lark(schema))
    return answer_or_calls(answer, FORMATS[name], NAMES, tokenizer.token_id, in_parallel=in_parallel)


def is_whole(tokenizer: Tokenizer, grammars: Grammars, grammar: str, text: str) -> bool:
    matcher = advanced(grammars, lark(grammar), tokenizer.encode(text, add_special_tokens=False))
    return not matcher.error and EOS[0] in allowed(matcher)


def of(cases: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, texts in cases.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), [*of(WHOLE), *((name, ANSWER) for name in FORMATS)])
def test_an_answer_or_calls_may_be_written(tokenizer: Tokenizer, grammars: Grammars, name: str, text: str) -> None:
    assert is_whole(tokenizer, grammars, grammar_of(tokenizer, name), text)


@pytest.mark.parametrize(("name", "text"), of(REFUSED))
def test_no_mixture_and_no_other_function_may_be_written(
    tokenizer: Tokenizer, grammars: Grammars, name: str, text: str
) -> None:
    assert not is_whole(tokenizer, grammars, grammar_of(tokenizer, name), text)


@pytest.mark.parametrize("name", FORMATS)
def test_not_in_parallel_there_is_one_call(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    alone = grammar_of(tokenizer, name, in_parallel=False)
    assert is_whole(tokenizer, grammars, alone, WHOLE[name][0])
    assert not is_whole(tokenizer, grammars, alone, SEVERAL[name])
    assert is_whole(tokenizer, grammars, grammar_of(tokenizer, name), SEVERAL[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_may_be_written_beside_any_object(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    free = grammar_of(tokenizer, name, {"type": "object"})
    assert all(is_whole(tokenizer, grammars, free, text) for text in (WHOLE[name][0], '{"x": {"name": 1}}', '{"name": "x"}'))


def test_marks_that_are_tokens_are_those_tokens_alone(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for name, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        first = allowed(grammars.matcher(lark(grammar_of(tokenizer, name))))
        token_id, spelt = tokenizer.token_id(mark), tokenizer.token_id(mark[0])
        assert (token_id in first, spelt in first) == (token_id is not None, token_id is None)


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_calls_may_be_written_they_are_read_as_calls(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    calls = grammar_of(tokenizer, name).replace("start: answer | calls", "start: calls")
    num_begun = 0
    for seed in range(12):
        token_ids = walk(grammars.matcher(lark(calls)), EOS, seed, most=300)
        text = tokenizer.decode([one for one in token_ids if one not in EOS], skip_special_tokens=False)
        pieces = CallReader(FORMATS[name], NAMES).push(text)
        assert all(isinstance(piece, (Called, Argued)) for piece in pieces), text
        num_begun += any(isinstance(piece, Called) for piece in pieces)
    assert num_begun > 6


@pytest.mark.parametrize("name", FORMATS)
def test_the_longest_head_is_read(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    long, key = "f" * 64, FORMATS[name].arguments_key
    begin = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]["}[name]
    parts = (begin, "{", '"type"', ":", '"function"', ",", '"name"', ":", f'"{long}"', ",", f'"{key}"', ":", "{")
    grammar = lark(answer_or_calls("{}", FORMATS[name], [long], tokenizer.token_id, in_parallel=True))
    for num_blanks, may_be_written in ((32, True), (33, False)):
        head = (" " * num_blanks).join(parts)
        matcher = advanced(grammars, grammar, tokenizer.encode(head, add_special_tokens=False))
        assert (not matcher.error) is may_be_written
        assert CallReader(FORMATS[name], [long]).push(head)[0] == Called(long)


@pytest.mark.parametrize("name", FORMATS)
def test_of_very_many_functions_each_may_be_called(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    names = [f"server.tool_{number}" for number in range(700)]
    grammar = answer_or_calls('{"type":"integer"}', FORMATS[name], names, tokenizer.token_id, in_parallel=True)
    call = {"hermes": hermes, "llama3_json": llama, "mistral": mistral}[name]
    assert is_whole(tokenizer, grammars, grammar, call(names[-1]))
    assert not is_whole(tokenizer, grammars, grammar, call("server-tool_1"))
    assert not is_whole(tokenizer, grammars, grammar, call("server.tool_700"))
