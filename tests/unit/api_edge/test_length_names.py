"""The length of a completion has two names; its errors have the one that came."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

NEWER = "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({NEWER: 4}, 4),
        ({NEWER: 4, "max_tokens": 4, "stop": None}, 4),
        ({NEWER: 4.0, "max_tokens": None}, 4),
        ({NEWER: None, "max_tokens": 5}, 5),
        ({NEWER: None}, 16),
        ({NEWER: 0, "max_tokens": 0, "echo": True, "logprobs": 1}, None),
    ],
)
def test_either_name_gives_the_length(tokenizer: Tokenizer, fields: dict[str, Any], length: int | None) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", json={"prompt": "the"} | fields)
            assert answer.status_code == 200, answer.text
            if length is None:
                assert answer.json()["choices"][0]["text"] == "the", "nothing but the prompt"
            else:
                assert served.engine.requests[0].sampling.max_tokens == length

    run(check())


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({NEWER: 4, "max_tokens": 5}, NEWER, "must equal max_tokens = 5 or be left out; got 4"),
        ({NEWER: 0}, NEWER, "must be at least 1"),
        ({NEWER: 999}, NEWER, f"lower {NEWER}"),
        ({NEWER: "4"}, NEWER, "must be an integer"),
        ({"max_tokens": 999}, "max_tokens", "lower max_tokens"),
    ],
)
def test_two_lengths_are_refused_and_errors_name_the_one_that_came(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, told: str
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", json={"prompt": "the"} | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert told in error["message"]
            assert served.engine.requests == []

    run(check())
