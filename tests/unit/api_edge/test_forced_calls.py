"""A call that `tool_choice` forces: the grammar that the engine gets, and what of its text reaches the client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body
from jdisagg.api.http.call_grammars import with_forced
from jdisagg.api.http.calls import CallsReader, Offer, read_offer
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import GrammarKind, SamplingParams
from jdisagg.text.grammar import read_schema
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, FakeEngine, run, serving
from tests.unit.text.grammar_rig import demo_grammars
from tests.unit.text.tiny_tokenizer import train_byte_level

CITY = {"properties": {"city": {"$ref": "#/$defs/C"}}, "required": ["city"], "$defs": {"C": {"type": "string"}}}
NEXT = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
ONE_OF = {"properties": {"n": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}  # whose branches overlap
TAGGED = {
    "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/cat"}], "discriminator": {"propertyName": "kind"}}},
    "$defs": {
        "cat": {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}}}
    },
}
LOG_IN = {"properties": {"password": {"type": "string", "format": "password"}}}  # a format that llguidance does not know
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "next-1", "parameters": NEXT}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "rest", "parameters": None}},
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "log-in", "parameters": LOG_IN}},
    {"type": "function", "function": {"name": "one-of", "parameters": ONE_OF}},
    {"type": "function", "function": {"name": "dense", "parameters": ONE_OF | {"x-guidance": {"whitespace_pattern": ""}}}},
    {"type": "function", "function": {"name": "tagged", "parameters": TAGGED}},
]
WITHOUT = ("now", "stop", "rest")  # of parameters: their calls have no arguments
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "K}\\"{"}'
BOTH = f'[{{"name":"weather","parameters":{ARGUMENTS}}},{{"name":"now","parameters":{{}}}}]'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = train_byte_level(tmp_path_factory.mktemp("tiny"))
    return LLTokenizer((directory / "tokenizer.json").read_text(), eos_token=EOS)


def call(name: str, arguments: str) -> str:
    return f'{{"name":"{name}","parameters":{arguments}}}'


@pytest.mark.parametrize(
    ("asked", "text", "is_whole"),
    [
        ({"tool_choice": NAMED}, ARGUMENTS, True),
        ({"tool_choice": NAMED}, "{}", False),
        *(({"tool_choice": {"type": "function", "function": {"name": name}}}, "{}", True) for name in WITHOUT),
        *(({"tool_choice": {"type": "function", "function": {"name": name}}}, '{"a": 1}', False) for name in WITHOUT),
        ({"tool_choice": {"type": "function", "function": {"name": "free"}}}, '{"a": 1}', True),
        ({"tool_choice": {"type": "function", "function": {"name": "free"}}}, "1", False),
        ({"tool_choice": "required"}, BOTH, True),
        ({"tool_choice": "required"}, "[]", False),
        ({"tool_choice": "required"}, "[" + call("weather", "{}") + "]", False),
        ({"tool_choice": "required"}, "[" + call("next-1", '{"next":{"next":{}}}') + "]", True),
        ({"tool_choice": "required"}, "[" + call("next-1", '{"next":{"city":""}}') + "]", False),
        ({"tool_choice": "required"}, "[" + call("other", "{}") + "]", False),
        ({"tool_choice": "required"}, "[" + call("stop", "{}") + "]", True),
        ({"tool_choice": "required"}, "[" + call("stop", '{"a":1}') + "]", False),
        ({"tool_choice": "required"}, "[" + call("free", '{"a":1}') + "]", True),
        ({"tool_choice": "required"}, "[" + call("log-in", '{"password":"x"}') + "]", True),
        ({"tool_choice": {"type": "function", "function": {"name": "log-in"}}}, '{"password":1}', False),
        ({"tool_choice": {"type": "function", "function": {"name": "one-of"}}}, '{"n": 5}', True),
        ({"tool_choice": {"type": "function", "function": {"name": "tagged"}}}, '{"pet": {"kind": "cat"}}', True),
        ({"tool_choice": {"type": "function", "function": {"name": "tagged"}}}, '{"pet": {"lives": 9}}', False),
        ({"tool_choice": "required"}, "[" + call("one-of", '{"n": 5}') + "]", True),
        ({"tool_choice": "required"}, "[" + call("one-of", '{"n": ""}') + "]", False),
        ({"tool_choice": "required"}, "[" + call("dense", '{"n":5}') + "]", True),
        ({"tool_choice": "required"}, "[" + call("dense", '{"n": 5}') + "]", False),
        ({"tool_choice": "required"}, "[" + call("tagged", '{"pet":{"kind":"cat"}}') + "]", True),
        ({"tool_choice": "required"}, "[" + call("tagged", '{"pet":{"lives":9}}') + "]", False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "[" + call("now", "{}") + "]", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, BOTH, False),
    ],
)
def test_the_grammar_takes_calls_of_the_tools_alone(
    vocabulary: LLTokenizer, asked: dict[str, Any], text: str, is_whole: bool
) -> None:
    grammar = with_forced(SamplingParams(), Body(CHAT | asked)).grammar
    assert grammar is not None
    is_lark = grammar.kind is GrammarKind.LARK
    matcher = LLMatcher(vocabulary, (LLMatcher.grammar_from_lark if is_lark else read_schema)(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = vocabulary.tokenize_bytes(text.encode())
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_whole


def test_of_a_function_that_is_not_offered_those_that_are_can_be_chosen_from() -> None:
    asked = {"tools": TOOLS[:2], "tool_choice": {"type": "function", "function": {"name": "wether"}}}
    told = "tool_choice: no function of tools is called 'wether'; tools has 'weather', 'next-1'"
    with pytest.raises(InvalidRequest, match=f"^{told}$"):
        with_forced(SamplingParams(), Body(CHAT | asked))


@pytest.mark.parametrize("first", [True, False])
def test_what_is_looked_at_for_tags_has_one_bound_for_all_functions(first: bool) -> None:
    """Twenty of them, each with as much as one may, would hold everybody up for 0.3 s."""
    union = {"discriminator": {"propertyName": "t"}, "oneOf": [{"$ref": "#/$defs/u"}]}
    wide = {"properties": {f"p{i}": union for i in range(50)}, "$defs": {"u": {"anyOf": [{}] * 1000}}}
    functions = [{"name": "wide", "parameters": wide}]
    functions.insert(not first, {"name": "tagged", "parameters": TAGGED})
    tools = [{"type": "function", "function": function} for function in functions]
    asked = with_forced(SamplingParams(), Body(CHAT | {"tools": tools, "tool_choice": "required"})).grammar
    assert asked is not None
    assert ('"required":["kind"]' in asked.text) is first


def test_as_many_functions_as_openai_takes_fit_while_each_is_short() -> None:
    """What is written around each of them counts towards the length of a grammar, too."""
    properties = {f"p{i}": {"type": "string", "enum": ["e" * 20]} for i in range(6)}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"function_{i}", "parameters": parameters}} for i in range(128)]
    asked = with_forced(SamplingParams(), Body(CHAT | {"tools": tools, "tool_choice": "required"})).grammar
    assert asked is not None
    assert len(asked.text) <= MAX_GRAMMAR_BYTES
    assert asked.text.count("whitespace_pattern") == 128


def test_an_answer_has_the_calls_and_no_content(tokenizer: Tokenizer) -> None:
    cases = [
        ({"tool_choice": NAMED}, ARGUMENTS, [("weather", ARGUMENTS)], "stop"),
        ({"tool_choice": "required"}, BOTH, [("weather", ARGUMENTS), ("now", "{}")], "tool_calls"),
        ({"tool_choice": "required", "max_tokens": 3}, BOTH, [], "length"),
        ({"tool_choice": "required", "stop": "weather"}, BOTH, [], "stop"),
        ({"tool_choice": "required", "stop": "]"}, BOTH, [("weather", ARGUMENTS), ("now", "{}")], "tool_calls"),
    ]

    async def check() -> None:
        for asked, text, calls, finish in cases:
            engine = FakeEngine(tokenizer, text, max_model_len=4096)
            async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
                whole = await http.post("/v1/chat/completions", json=CHAT | asked | {"n": 2})
                assert whole.status_code == 200, whole.text
                for choice in whole.json()["choices"]:
                    assert choice["message"]["content"] is None
                    shown = [one["function"] for one in choice["message"]["tool_calls"]]
                    assert [(one["name"], one["arguments"]) for one in shown] == calls
                    assert choice["finish_reason"] == finish
                ids = [one["id"] for choice in whole.json()["choices"] for one in choice["message"]["tool_calls"]]
                assert len(set(ids)) == 2 * len(calls)
                assert served.grammars.prepared == [engine.requests[0].sampling.grammar]
                prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
                assert "next-1" in prompt

    run(check())


def test_a_stream_has_the_same_calls_in_parts(tokenizer: Tokenizer) -> None:
    cases = [
        (NAMED, ARGUMENTS, [("weather", ARGUMENTS)], "stop"),
        ("required", BOTH, [("weather", ARGUMENTS), ("now", "{}")], "tool_calls"),
        ("required", f'[{{"name":"weather","parameters":{ARGUMENTS[:8]}', [("weather", ARGUMENTS[:8])], "stop"),
    ]

    async def check() -> None:
        for tool_choice, text, calls, finish in cases:
            engine = FakeEngine(tokenizer, text, max_model_len=4096)
            async with serving(engine, tokenizer) as served:
                for more in ({}, {"logprobs": True}):
                    asked: dict[str, Any] = {
                        **CHAT,
                        "tool_choice": tool_choice,
                        "model": "tiny",
                        "n": 2,
                        "stream": True,
                        **more,
                    }
                    deltas: dict[int, list[Any]] = {0: [], 1: []}
                    finishes, num_scored = dict[int, str](), 0
                    async for chunk in await served.client.chat.completions.create(**asked):
                        [choice] = chunk.choices
                        assert choice.delta.content is None
                        deltas[choice.index] += choice.delta.tool_calls or []
                        num_scored += len(choice.logprobs.content or []) if choice.logprobs else 0
                        if choice.finish_reason:
                            finishes[choice.index] = choice.finish_reason
                        elif not more and not choice.delta.role:
                            assert choice.delta.tool_calls
                    assert finishes == {0: finish, 1: finish}
                    assert num_scored == (2 * len(tokenizer.encode(text, add_special_tokens=False)) + 2 if more else 0)
                    for parts in deltas.values():
                        assert joined(part.model_dump(exclude_none=True) for part in parts) == calls
                        assert len({part.id for part in parts} - {None}) == len(calls)

    run(check())


def test_a_schema_that_does_not_compile_is_the_fault_of_the_tools(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "x"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            wrong = [{"type": "function", "function": {"name": "weather", "parameters": {"const": "@"}}}]
            for tool_choice in (NAMED, "required"):
                body = CHAT | {"tools": wrong, "tool_choice": tool_choice}
                error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
                assert (error["param"], error["message"]) == ("tools", "tools: has an @")

    run(check())


@pytest.mark.parametrize("tool_choice", [NAMED, "required"])
def test_a_forced_call_goes_before_response_format_and_not_before_other_fields_of_a_grammar(
    tokenizer: Tokenizer, tool_choice: Any
) -> None:
    formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"const": "@"}}}]
    wrong, engine = [tool("weather", {"const": "@"})], FakeEngine(tokenizer, "x", max_model_len=4096)

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            body = CHAT | {"tool_choice": tool_choice}
            for response_format in formats:
                answer = await http.post("/v1/chat/completions", json=body | {"response_format": response_format})
                assert answer.status_code == 200, answer.text
                assert served.engine.requests[-1].sampling.grammar == with_forced(SamplingParams(), Body(body)).grammar
                fault = body | {"response_format": response_format, "tools": wrong}
                assert (await http.post("/v1/chat/completions", json=fault)).json()["error"]["param"] == "tools"
            for other in ({"structured_outputs": {"regex": "a"}}, {"guided_json": {}}, {"json_schema": {}}, {"regex": "a"}):
                answer = await http.post("/v1/chat/completions", json=body | other)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")

    run(check())


@pytest.mark.parametrize("name", ["weather", "next-1", "now", "stop"])
def test_of_several_functions_the_one_at_fault_is_named(tokenizer: Tokenizer, name: str) -> None:
    tools = [one if one["function"]["name"] != name else tool(name, {"properties": {"@": {"type": "x"}}}) for one in TOOLS]
    body = CHAT | {"tools": tools, "tool_choice": "required"}
    grammar = with_forced(SamplingParams(), Body(body)).grammar
    assert grammar is not None
    with pytest.raises(InvalidRequest) as refused:
        demo_grammars().compile(grammar)

    async def check() -> None:
        engine = FakeEngine(tokenizer, "x", max_model_len=4096)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            served.grammars.error = refused.value
            error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
            told = f"tools: parameters of {name}: failed to compile JSON schema: Invalid type: x"
            assert (error["param"], error["message"]) == ("tools", told)

    run(check())


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


JSON = st.recursive(st.text() | st.integers(), lambda one: st.lists(one) | st.dictionaries(st.text(), one))
JSON_OBJECTS = st.dictionaries(st.text(), JSON)


@given(
    st.lists(st.tuples(st.sampled_from(["weather", "now"]), JSON_OBJECTS, st.booleans()), min_size=1, max_size=3),
    st.lists(st.integers(0, 200)),
)
def test_calls_are_the_same_wherever_their_text_is_cut(
    tokenizer: Tokenizer, called: list[tuple[str, Any, bool]], cuts: list[int]
) -> None:
    required, weather = (offer_of(tokenizer, choice) for choice in ("required", NAMED))
    calls = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value, ascii_only in called]
    text = "[" + ",".join(call(*one) for one in calls) + "]"
    message = CallsReader(required).message(text)
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]] == calls
    for places in (cuts, range(len(text))):
        assert joined(read(required, text, places)) == calls
        assert joined(read(weather, calls[0][1], places)) == [("weather", calls[0][1])]


def offer_of(tokenizer: Tokenizer, choice: Any) -> Offer:
    offer = read_offer(Body(CHAT | {"tool_choice": choice}), Edge(FakeEngine(tokenizer, ""), tokenizer))
    assert offer is not None
    return offer


def read(offer: Offer, text: str, cuts: Iterable[int]) -> list[dict[str, Any]]:
    reader, edges = CallsReader(offer), [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    news = [reader.news(text[begin:end], is_last=end == len(text)) for begin, end in pairwise(edges)]
    assert all("content" not in one for one in news)
    return [part for one in news for part in one.get("tool_calls", ())]


def joined(parts: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """As clients put them together."""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        assert ("id" in part) == ("name" in part["function"]) == (part["index"] not in calls)
        assert part["function"]["arguments"]
        name, arguments = calls.get(part["index"], (part["function"].get("name"), ""))
        calls[part["index"]] = name, arguments + part["function"]["arguments"]
    return [calls[index] for index in range(len(calls))]
