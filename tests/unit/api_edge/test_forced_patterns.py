"""Parameters of calls that are forced: what is looked into is bounded first, and read as in any other schema."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http import call_grammars
from jdisagg.api.http.body import Body
from jdisagg.api.http.call_grammars import with_forced
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, SamplingParams
from tests.unit.text.grammar_rig import advanced, demo_grammars, demo_tokenizer

QUOTED = {"type": "object", "properties": {"a": {"type": "string", "pattern": '^[^"]+$'}}, "required": ["a"]}
BARE = {"properties": {"description": {"const": "b"}}, "required": ["description"]}
NAMED = {"type": "function", "function": {"name": "f"}}


def forced(choice: Any, *parameters: Any) -> Grammar:
    names = "fgh"
    tools = [{"function": {"name": names[number], "parameters": one}} for number, one in enumerate(parameters)]
    grammar = with_forced(SamplingParams(), Body({"tools": tools, "tool_choice": choice})).grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize(("choice", "head"), [(NAMED, ""), ("required", '[{"name":"f","parameters":')])
def test_a_pattern_of_a_forced_call_keeps_out_the_quotes_that_it_excludes(choice: Any, head: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grammar = forced(choice, QUOTED)
        for text, error in (('{"a":"b', False), ('{"a":"\\"', True)):
            token_ids = demo_tokenizer().encode(head + text, add_special_tokens=False)
            assert bool(advanced(demo_grammars(), grammar, token_ids).error) is error, text


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_parameters_that_are_too_long_are_not_looked_into(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_grammars, "schema_in_lark", None)
    with pytest.raises(
        InvalidRequest, match=f"^tools: .*at most {MAX_GRAMMAR_BYTES} bytes beside titles, .*; shorten it"
    ) as refused:
        forced(choice, {"x": [0] * MAX_GRAMMAR_BYTES})
    assert refused.value.field == "tools"


def test_of_all_functions_parameters_may_have_as_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"type": "object", "x-of": "d" * (MAX_GRAMMAR_BYTES // 2)}
    assert len(json.loads(forced(NAMED, half, half).text)["x-of"]) == MAX_GRAMMAR_BYTES // 2
    monkeypatch.setattr(call_grammars, "schema_in_lark", None)
    with pytest.raises(InvalidRequest, match=r"^tools: their parameters"):
        forced("required", half, half)


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_what_describes_parameters_is_neither_counted_nor_compiled(choice: Any) -> None:
    wordy = {"title": "t" * MAX_GRAMMAR_BYTES, "description": "d" * MAX_GRAMMAR_BYTES, "default": {"a": "b"}}
    asked = {"properties": {"description": {"const": "b"} | wordy}, "required": ["description"]} | wordy
    assert forced(choice, asked, asked) == forced(choice, BARE, BARE)
    described = {"$ref": "#/default", "default": {"type": "object", "title": "t"}}
    assert '"default"' in forced(choice, described).text


@pytest.mark.parametrize(("choice", "head"), [(NAMED, ""), ("required", '[{"name":"f","parameters":')])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": None, "properties": {"a": {"const": "b", "format": None}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"const": "b", "enum": None, "items": None}}, "required": ["a"]},
        {"propertyNames": {"const": "a"}, "additionalProperties": {"const": "b"}, "required": ["a"]},
        {"properties": {"a": {"anyOf": [{"const": "b"}, {"pattern": "(?!a)"}]}}, "required": ["a"]},
    ],
    ids=str,
)
def test_parameters_are_read_as_any_other_schema(choice: Any, head: str, parameters: dict[str, Any]) -> None:
    grammar = forced(choice, parameters)
    for text, error in (('{"a":"b"', False), ('{"a":"c"', True), ("{}", True), ('"a"', True)):
        token_ids = demo_tokenizer().encode(head + text, add_special_tokens=False)
        assert bool(advanced(demo_grammars(), grammar, token_ids).error) is error, text


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize(
    "parameters", [{"required": None}, {"properties": None}, {"type": None}, {"type": None, "properties": {}}]
)
def test_null_is_the_value_of_no_keyword_of_parameters(choice: Any, parameters: dict[str, Any]) -> None:
    grammar = forced(choice, parameters)
    head = "" if choice == NAMED else '[{"name":"f","parameters":'
    assert not advanced(demo_grammars(), grammar, demo_tokenizer().encode(head + "{}", add_special_tokens=False)).error


@pytest.mark.parametrize(("choice", "head"), [(NAMED, ""), ("required", '[{"name":"f","parameters":')])
def test_no_more_blanks_come_in_a_row_than_in_any_other_schema(choice: Any, head: str) -> None:
    grammar, tokenizer = forced(choice, QUOTED), demo_tokenizer()
    for num_blanks, error in ((80, False), (81, True)):
        token_ids = tokenizer.encode(f"{head}{{{' ' * num_blanks}", add_special_tokens=False)
        assert bool(advanced(demo_grammars(), grammar, token_ids).error) is error, num_blanks
