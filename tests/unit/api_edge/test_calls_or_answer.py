"""`response_format` beside tools: the model calls one of them or answers in the format, and the client sees which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.grammar import Grammars
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, FakeEngine, Served, run, serving
from tests.unit.text.grammar_rig import advanced, allowed, vocabulary
from tests.unit.text.tiny_tokenizer import train_byte_level

PATH = "/v1/chat/completions"
ARGUMENTS = '{"city": "K}\\"{"}'
ANSWER = '{"name": "weather", "n": 3}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"oneOf": [{"type": "number"}, {"type": "integer"}]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
IN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
ANY_OBJECT = {"type": "json_object"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "odd name!")]
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "response_format": IN_SCHEMA,
}
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
}
BOTH = {
    "hermes": CALLS["hermes"] * 2,
    "llama3_json": f"{CALLS['llama3_json']}; {CALLS['llama3_json']}",
    "mistral": CALLS["mistral"] * 2,
}
Shown = tuple[str, list[tuple[str, str]], str]  # content, calls, finish_reason
CALLED: Shown = ("", [("weather", ARGUMENTS)], "tool_calls")
ANSWERED: Shown = (ANSWER, [], "stop")


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """All marks but those of hermes are special tokens, as they are in models."""
    directory: Path = train_byte_level(tmp_path_factory.mktemp("marked"))
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def grammars(marked: Tokenizer) -> Grammars:
    return Grammars(vocabulary(marked, (EOS,)))


def shown(answer: dict[str, Any]) -> list[Shown]:
    """Of each choice."""
    return [
        (
            choice["message"]["content"] or "",
            [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    ]


def streamed(text: str, n: int) -> list[Shown]:
    """What clients put together of a stream, for each choice."""
    said, calls, finishes = [""] * n, [list[list[str]]() for _ in range(n)], [""] * n
    for line in text.split("\n\n"):
        if line in ("", "data: [DONE]"):
            continue
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        index, delta = choice["index"], choice["delta"]
        said[index] += delta.get("content") or ""
        finishes[index] = choice["finish_reason"] or finishes[index]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls[index].append([part["function"]["name"], ""])
            calls[index][part["index"]][1] += part["function"]["arguments"]
    return [(said[i], [(name, arguments) for name, arguments in calls[i]], finishes[i]) for i in range(n)]


def may_be_written(tokenizer: Tokenizer, grammars: Grammars, grammar: Grammar, text: str) -> bool:
    matcher = advanced(grammars, grammar, tokenizer.encode(text, add_special_tokens=False))
    return not matcher.error and EOS in allowed(matcher)


async def grammar_of(served: Served, body: dict[str, Any]) -> Grammar | None:
    """What came to the engine."""
    async with httpx.AsyncClient(base_url=served.http) as http:
        answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return served.engine.requests[-1].sampling.grammar


@pytest.mark.parametrize("response_format", [IN_SCHEMA, ANY_OBJECT, {"type": "json_object", "schema": SCHEMA}])
@pytest.mark.parametrize("name", FORMATS)
def test_of_two_choices_one_may_call_and_the_other_answer(
    marked: Tokenizer, grammars: Grammars, name: str, response_format: dict[str, Any]
) -> None:
    engine = FakeEngine(marked, CALLS[name], ANSWER, max_model_len=4096)
    body = CHAT | {"response_format": response_format, "n": 2, "tool_choice": "auto"}

    async def check() -> None:
        async with (
            serving(engine, marked, call_format=FORMATS[name]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            whole = await http.post(PATH, json=body)
            assert whole.status_code == 200, whole.text
            assert shown(whole.json()) == [CALLED, ANSWERED]
            for tokens_per_output in (1, 5):
                engine.tokens_per_output = tokens_per_output
                stream = await http.post(PATH, json=body | {"stream": True})
                assert streamed(stream.text, 2) == [CALLED, ANSWERED]
            [grammar] = {request.sampling.grammar for request in engine.requests}
            assert served.grammars.prepared == [grammar] * 3
            assert grammar is not None
            assert grammar.kind is GrammarKind.LARK
            assert all(may_be_written(marked, grammars, grammar, text) for text in (CALLS[name], BOTH[name], ANSWER))
            other = CALLS[name].replace("weather", "other")
            is_any_object = name == "llama3_json" and response_format == ANY_OBJECT
            assert may_be_written(marked, grammars, grammar, other) is is_any_object
            assert not may_be_written(marked, grammars, grammar, ANSWER + CALLS[name])

    run(check())


@pytest.mark.parametrize("name", FORMATS)
def test_not_in_parallel_one_call_may_be_written(marked: Tokenizer, grammars: Grammars, name: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(marked, CALLS[name], max_model_len=4096), marked, call_format=FORMATS[name]) as served:
            grammar = await grammar_of(served, CHAT | {"parallel_tool_calls": False})
            assert grammar is not None
            assert may_be_written(marked, grammars, grammar, CALLS[name])
            assert not may_be_written(marked, grammars, grammar, BOTH[name])

    run(check())


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_has_what_there_is_of_its_arguments(marked: Tokenizer, name: str) -> None:
    num = len(marked.encode(CALLS[name][: CALLS[name].index("K}")], add_special_tokens=False))

    async def check() -> None:
        async with (
            serving(FakeEngine(marked, CALLS[name], max_model_len=4096), marked, call_format=FORMATS[name]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            answer = await http.post(PATH, json=CHAT | {"max_tokens": num})
            assert shown(answer.json()) == [("", [("weather", '{"city": "')], "length")]

    run(check())


@pytest.mark.parametrize(
    "others", [{"tool_choice": "none"}, {"tools": []}, {"call_format": None}, {"structured_outputs": {"json": SCHEMA}}]
)
def test_elsewhere_the_answer_is_by_its_schema_alone(marked: Tokenizer, others: dict[str, Any]) -> None:
    call_format = others.get("call_format", FORMATS["hermes"])
    body = CHAT | others | ({"response_format": None} if "structured_outputs" in others else {})

    async def check() -> None:
        async with serving(FakeEngine(marked, ANSWER, max_model_len=4096), marked, call_format=call_format) as served:
            grammar = await grammar_of(served, {name: value for name, value in body.items() if name != "call_format"})
            assert grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))

    run(check())


def test_a_response_format_of_text_is_no_grammar(marked: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(marked, ANSWER, max_model_len=4096), marked, call_format=FORMATS["hermes"]) as served:
            assert await grammar_of(served, CHAT | {"response_format": {"type": "text"}}) is None

    run(check())


def test_a_schema_is_read_as_without_tools(marked: Tokenizer, grammars: Grammars) -> None:
    """Branches that overlap, formats that say nothing, the tag of a union, and the blanks that it asks for."""
    tagged = {
        "properties": {
            "pet": {"oneOf": [{"$ref": "#/$defs/cat"}], "discriminator": {"propertyName": "kind"}},
            "key": {"type": "string", "format": "password"},
            "n": SCHEMA["properties"]["n"],
        },
        "required": ["pet"],
        "$defs": {"cat": {"properties": {"kind": {"const": "cat", "default": "cat"}}}},
        "x-guidance": {"whitespace_pattern": ""},
    }
    asked = CHAT | {"response_format": {"type": "json_object", "schema": tagged}}

    async def check() -> None:
        async with serving(FakeEngine(marked, ANSWER, max_model_len=4096), marked, call_format=FORMATS["hermes"]) as served:
            grammar = await grammar_of(served, asked)
            assert grammar is not None
            assert may_be_written(marked, grammars, grammar, '{"pet":{"kind":"cat"},"key":"x","n":3}')
            assert not may_be_written(marked, grammars, grammar, '{"pet":{},"key":"x","n":3}')
            assert not may_be_written(marked, grammars, grammar, '{"pet": {"kind":"cat"},"key":"x","n":3}')

    run(check())


def test_a_schema_that_does_not_compile_is_the_fault_of_response_format(marked: Tokenizer, grammars: Grammars) -> None:
    wrong = CHAT | {"response_format": {"type": "json_object", "schema": {"properties": {"@": {"type": "x"}}}}}

    async def check() -> None:
        async with (
            serving(FakeEngine(marked, ANSWER, max_model_len=4096), marked, call_format=FORMATS["hermes"]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            assert (await http.post(PATH, json=wrong)).status_code == 400
            with pytest.raises(InvalidRequest) as refused:
                grammars.compile(served.grammars.prepared[-1])
            served.grammars.error = refused.value
            error = (await http.post(PATH, json=wrong)).json()["error"]
            told = "response_format: failed to compile JSON schema: Invalid type: x"
            assert (error["param"], error["message"]) == ("response_format", told)

    run(check())


def test_the_schema_and_the_names_of_tools_are_bounded_together(marked: Tokenizer) -> None:
    long = {"type": "object", "properties": {"a": {"const": "x" * (MAX_GRAMMAR_BYTES - 1000)}}}
    long_names = [{"type": "function", "function": {"name": f"{i}{'x' * 60}"}} for i in range(20)]
    body = CHAT | {"response_format": {"type": "json_object", "schema": long}}

    async def check() -> None:
        async with (
            serving(FakeEngine(marked, ANSWER, max_model_len=9000), marked, call_format=FORMATS["hermes"]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            assert await grammar_of(served, body) is not None
            answer = await http.post(PATH, json=body | {"tools": long_names})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "response_format")
            told = "response_format: with the names of tools it may have at most 65536 bytes; got 664"
            assert error["message"].startswith(told)

    run(check())
