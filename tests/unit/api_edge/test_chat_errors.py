"""What a chat's errors name is what a chat has: `messages`, and nothing that it refuses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

from jdisagg.core.errors import ContextLengthExceeded, InvalidRequest
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

STUCK = InvalidRequest("request r: its grammar cannot go on", field="grammar")
TOO_LONG = ContextLengthExceeded("request r: a prompt may have at most 7 tokens", field="prompt")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_that_is_too_long_names_its_messages(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for words, fields, param in (  # by its tokens, by its characters, by what is left of the context
                (300, {}, "messages"),
                (10_000, {}, "messages"),
                (1, {"max_tokens": 199}, "max_tokens"),
                (1, {"max_completion_tokens": 199}, "max_completion_tokens"),
            ):
                chat = CHAT | {"messages": [{"role": "user", "content": "fox " * words}]} | fields
                for stream in (False, True):
                    answer = await http.post("/v1/chat/completions", json=chat | {"stream": stream})
                    error = answer.json()["error"]
                    assert answer.status_code == 400
                    assert (error["param"], error["code"]) == (param, "context_length_exceeded"), error
                    assert all(name in error["message"] for name in fields), error
            assert served.engine.requests == []

    run(check())


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        (CHAT | {"response_format": {"type": "json_object"}}, STUCK, "response_format"),
        (CHAT | {"tools": TOOLS, "tool_choice": "required"}, STUCK, "tools"),
        (CHAT, TOO_LONG, "messages"),
        ({"prompt": "the", "guided_regex": "a+"}, STUCK, "guided_regex"),
        ({"prompt": "the"}, TOO_LONG, "prompt"),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_error_that_comes_late_names_the_field_that_was_sent(
    tokenizer: Tokenizer, asked: dict[str, Any], error: InvalidRequest, param: str, num_tokens: int
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "the quick brown fox")
        engine.failure = num_tokens, error
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            answer = await http.post(path, json=asked)
            answers = [answer.json()]
            streamed = await http.post(path, json=asked | {"stream": True})
            answers.append(json.loads(streamed.text.split("data: ")[-1]))
            code = "context_length_exceeded" if error is TOO_LONG else None
            told = {"message": error.message, "type": "invalid_request_error", "param": param, "code": code}
            assert (answer.status_code, answers) == (400, [{"error": told}] * 2)
            assert error.field in ("grammar", "prompt"), "it may be told to others"
            assert served.ends() == {}, "its engine has counted it"

    run(check())


def test_a_chat_of_no_tokens_is_not_advised_to_echo(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for name, number in itertools.product(("max_tokens", "max_completion_tokens"), (0, -1)):
                answer = await http.post("/v1/chat/completions", json=CHAT | {name: number})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name)
                assert error["message"] == f"{name}: must be at least 1; got {number}"
                assert "echo" not in error["message"], "a chat refuses it"
            assert served.engine.requests == []

    run(check())
