"""`return_tokens_as_token_ids`: log-probabilities name tokens by their ids, and nothing else of an answer changes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, FakeEngine, run, serving

ANSWER = "hello \U0001f600!"
COMPLETION: dict[str, Any] = {"prompt": "the", "logprobs": 2, "prompt_logprobs": 1, "echo": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}


async def _logprobs(http: httpx.AsyncClient, path: str, fields: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """Of one choice, whole or of each of its chunks."""
    answer = await http.post(path, json=fields | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()["choices"][0]["logprobs"]]
    events = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [event["logprobs"] for event in events if event["logprobs"]]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_completion_and_their_alternatives_are_named_by_their_ids(tokenizer: Tokenizer, stream: bool) -> None:
    token_ids = [*tokenizer.encode("the"), *tokenizer.encode(ANSWER, add_special_tokens=False), EOS]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            parts = await _logprobs(http, "/v1/completions", COMPLETION, stream=stream)
            named = await _logprobs(http, "/v1/completions", COMPLETION | {"return_tokens_as_token_ids": True}, stream=stream)
            assert [token for part in named for token in part["tokens"]] == [f"token_id:{one}" for one in token_ids]
            tops = [top for part in named for top in part["top_logprobs"]]
            assert tops[0] is None
            assert all(f"token_id:{one}" in top for one, top in zip(token_ids[1:], tops[1:], strict=True))
            assert {len(top) for top in tops[1:]} <= {2, 3}
            for name in ("token_logprobs", "text_offset"):
                assert [part[name] for part in named] == [part[name] for part in parts]

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_chat_are_named_by_their_ids_and_have_their_bytes(tokenizer: Tokenizer, stream: bool) -> None:
    token_ids = [*tokenizer.encode(ANSWER, add_special_tokens=False), EOS]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            path = "/v1/chat/completions"
            named = await _logprobs(http, path, CHAT | {"return_tokens_as_token_ids": True}, stream=stream)
            entries = [entry for part in named for entry in part["content"]]
            assert [entry["token"] for entry in entries] == [f"token_id:{one}" for one in token_ids]
            assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == ANSWER.encode()
            first = [alternative["token"] for alternative in entries[0]["top_logprobs"]]
            assert first == ["token_id:2", "token_id:3"], "as the engine had them"
            parts = await _logprobs(http, path, CHAT, stream=stream)
            for one, other in zip(entries, (entry for part in parts for entry in part["content"]), strict=True):
                assert (one["logprob"], one["bytes"]) == (other["logprob"], other["bytes"])

    run(check())


def test_the_form_of_prompt_logprobs_has_both_already(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            [named, plain] = [
                (await http.post("/v1/completions", json=COMPLETION | {"return_tokens_as_token_ids": flag})).json()
                for flag in (True, False)
            ]
            assert named["choices"][0]["prompt_logprobs"] == plain["choices"][0]["prompt_logprobs"]
            assert named["choices"][0]["text"] == plain["choices"][0]["text"]

    run(check())
