"""Fields that are nearly one that is read, where tokens are counted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.api.http.openapi import openapi_document
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "fields", "wrong", "near"),
    [
        ("/tokenize", {"prompt": "x"}, "add_special_token", "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES}, "add_generation_promt", "add_generation_prompt"),
        ("/detokenize", {"tokens": [3]}, "modell", "model"),
    ],
)
def test_tokens_of_a_body_with_a_misspelt_field_are_not_counted(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], wrong: str, near: str
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post(path, json=fields | {wrong: False})
            assert answer.status_code == 400, answer.text
            told = f"{wrong}: is no field of this request; did you mean {near}?"
            assert (answer.json()["error"]["param"], answer.json()["error"]["message"]) == (wrong, told)

    run(check())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("return_token_strs", "return_tokens: is called return_token_ids here"),
        ("max_new_token", "max_new_tokens: is called max_tokens here"),
        ("stop_sequence", "stop_sequences: is called stop here"),
        (
            "bad_word_ids",
            "bad_words_ids: tokens are forbidden by logit_bias, and texts by bad_words, alone; use these or leave it out",
        ),
        ("max_completion_token", "did you mean max_completion_tokens?"),
    ],
)
def test_nobody_is_led_to_a_field_that_is_refused(tokenizer: Tokenizer, path: str, wrong: str, hint: str) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            body = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
            answer = await http.post(path, json=body | {wrong: 1})
            told = {"param": wrong, "message": f"{wrong}: is no field of this request; {hint}"}
            assert (answer.status_code, answer.json()["error"]) == (400, answer.json()["error"] | told)

    run(check())


def test_a_refused_field_is_spelt_right_and_passes_where_it_asks_for_nothing(tokenizer: Tokenizer) -> None:
    """max_new_tokens is nearly one that is read, and says here what max_tokens does."""

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked = {"prompt": "x", "max_tokens": 3, "max_new_tokens": 3, "return_tokens": False, "stop_sequences": []}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200

    run(check())


def test_a_chat_s_body_is_sent_to_chats(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            error = (await http.post("/v1/completions", json={"messages": MESSAGES})).json()["error"]
            told = "messages: is a field of /v1/chat/completions; send it there, or a prompt"
            assert (error["param"], error["message"]) == ("messages", told)
            both = {"prompt": "x", "messages": MESSAGES}
            assert (await http.post("/v1/completions", json=both)).status_code == 200

    run(check())


def test_what_completions_and_chats_take_is_not_misspelt_where_their_tokens_are_counted(tokenizer: Tokenizer) -> None:
    paths = openapi_document("x")["paths"]

    def fields_of(path: str) -> set[str]:
        return {*paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]}

    cases = (
        ("/v1/chat/completions", "/tokenize", {"messages": MESSAGES}),
        ("/v1/completions", "/tokenize", {"prompt": "x"}),
        ("/v1/completions", "/detokenize", {"tokens": [3]}),
    )

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for whole, path, fields in cases:
                for name in sorted(fields_of(whole) - fields_of(path)):
                    answer = await http.post(path, json=fields | {name: 1})
                    assert answer.status_code == 200, (path, name, answer.text)

    run(check())
