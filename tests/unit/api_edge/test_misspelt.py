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
