"""What a chat's errors name is what a chat has: `messages`, and nothing that it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import httpx

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

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
