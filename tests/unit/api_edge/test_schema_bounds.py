"""The bounds that the schema tells are those that the endpoints keep: what lies on one is served, what lies beyond refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx

from jdisagg.api.http.openapi import openapi_document
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 2, "echo": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}, "max_completion_tokens": {"max_tokens": None}}
BELOW_BY_CONTEXT = ("max_tokens", "max_completion_tokens", "min_tokens")  # nobody reaches their maximum
BOUNDED = {
    *("n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "priority"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "timeout_s",
    ),
}


def test_numbers_on_a_bound_of_the_schema_are_served_and_numbers_beyond_are_refused(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        seen: set[str] = set()
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path, good in GOOD.items():
                for name, schema in properties(path).items():
                    for value, is_served in numbers(name, schema):
                        seen.add(name)
                        answer = await http.post(path, json=good | BESIDE.get(name, {}) | {name: value})
                        assert answer.status_code == (200 if is_served else 400), (path, name, value, answer.text)
                        if not is_served:
                            assert answer.json()["error"]["param"] == name
        assert seen == BOUNDED

    run(check())


def test_as_many_as_the_schema_allows_are_served_and_one_more_is_refused(tokenizer: Tokenizer) -> None:
    listed = properties("/v1/completions")
    stop, stops, _ = listed["stop"]["oneOf"]
    prompts = listed["prompt"]["oneOf"][2]["maxItems"]
    cases: list[tuple[str, int, Callable[[int], object]]] = [
        ("stop", stop["maxLength"], lambda n: "a" * n),
        ("stop", stops["maxItems"], lambda n: ["a"] * n),
        ("cache_salt", listed["cache_salt"]["maxLength"], lambda n: "a" * n),
        ("logit_bias", listed["logit_bias"]["maxProperties"], lambda n: {str(token): 100 for token in range(n)}),
        ("stop_token_ids", listed["stop_token_ids"]["maxItems"] - 1, lambda n: [5] * n),  # the fake has one EOS id
        ("request_id", listed["request_id"]["maxLength"], lambda n: "~!" * (n // 2) + "x" * (n % 2)),
        ("rid", listed["rid"]["maxLength"], lambda n: "a" * n),
        ("prompt", prompts, lambda n: ["a"] * n),
        ("guided_choice", listed["guided_choice"]["maxItems"], lambda n: ["a"] * n),
        ("guided_regex", listed["guided_regex"]["maxLength"], lambda n: "a" * n),
        ("guided_json", listed["guided_json"]["oneOf"][1]["maxLength"], lambda n: '{"const":"%s"}' % ("a" * (n - 12))),
    ]
    engine = FakeEngine(tokenizer, "fox")
    engine.card = replace(engine.card, vocab_size=1000)

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, most, make in cases:
                body = {"prompt": "the", "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body | {name: make(most)})).status_code == 200, name
                refused = await http.post("/v1/completions", json=body | {name: make(most + 1)})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)

    run(check())


def test_a_request_id_that_the_schema_excludes_is_refused_and_a_role_too(tokenizer: Tokenizer) -> None:
    named = properties("/v1/completions")["request_id"]
    role = properties("/v1/chat/completions")["messages"]["items"]["properties"]["role"]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name in ("", "a b", "\x7f", "é"):
                assert len(name) < named["minLength"] or re.search(named["pattern"], name) is None
                answer = await http.post("/v1/completions", json={"prompt": "the", "request_id": name})
                assert answer.status_code == 400, name
            assert role["minLength"] == 1
            answer = await http.post("/v1/chat/completions", json={"messages": [{"role": "", "content": "x"}]})
            assert answer.status_code == 400

    run(check())


def test_null_is_served_as_absence_where_the_schema_allows_it_and_refused_elsewhere(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path, good in (GOOD | {"/tokenize": {"prompt": "the"}, "/detokenize": {"tokens": [3]}}).items():
                for name, schema in properties(path).items():
                    answer = await http.post(path, json=(good if name != "echo" else {"prompt": "the"}) | {name: None})
                    is_needed = name in good and name not in ("max_tokens", "echo")
                    assert answer.status_code == (400 if is_needed else 200), (path, name, answer.text)
                    if path != "/tokenize" or name != "messages":
                        assert allows_null(schema) == (not is_needed), (path, name)

    run(check())


def allows_null(schema: dict[str, Any]) -> bool:
    kinds = [schema, *schema.get("oneOf", ())]
    return any(None in kind.get("enum", ()) or "null" in kind.get("type", ()) for kind in kinds)


def properties(path: str) -> dict[str, dict[str, Any]]:
    operation = openapi_document("tiny")["paths"][path]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]["properties"]


def numbers(name: str, schema: dict[str, Any]) -> list[tuple[float, bool]]:
    """(value, whether it is served) on and beyond each bound of a field."""
    found: list[tuple[float, bool]] = []
    if "minimum" in schema:
        found += [(schema["minimum"], True), (schema["minimum"] - 1, False)]
    if "exclusiveMinimum" in schema:
        found += [(schema["exclusiveMinimum"], False)]
    if "maximum" in schema:
        found += [(schema["maximum"] + 1, False)]
        if name not in BELOW_BY_CONTEXT:
            found += [(schema["maximum"], True)]
    return found


def test_what_the_schema_requires_within_a_field_is_refused_without_it(tokenizer: Tokenizer) -> None:
    chat = properties("/v1/chat/completions")
    message, tool, form = chat["messages"]["items"], chat["tools"]["items"], chat["response_format"]
    assert (message["required"], tool["required"], form["required"]) == (["role"], ["function"], ["type"])
    assert tool["properties"]["function"]["required"] == ["name"]
    assert message["anyOf"][0] == {"required": ["content"]}
    without_content = message["anyOf"][1]["properties"]["role"]["enum"]
    assert chat["guided_choice"]["minItems"] == 1
    hi = {"role": "user", "content": "hi"}
    refused: list[dict[str, Any]] = [
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "system"}, hi]},
        {"tools": [{}]},
        {"tools": [{"function": {}}]},
        {"response_format": {"json_schema": {"schema": {}}}},
        {"guided_choice": []},
    ]
    served: list[dict[str, Any]] = [{"messages": [hi, {"role": role}, hi]} for role in without_content]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as here, httpx.AsyncClient(base_url=here.http) as http:
            for status, bodies in ((400, refused), (200, served)):
                for body in bodies:
                    answer = await http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"] | body)
                    assert answer.status_code == status, (body, answer.text)

    run(check())
