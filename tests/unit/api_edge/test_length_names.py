"""The length of a completion has two names, and others say it beside these; its errors have the one that came."""

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


CHAT = {"messages": [{"role": "user", "content": "the"}]}


@pytest.mark.parametrize("name", ["max_new_tokens", "max_output_tokens", "n_predict", "num_predict"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", CHAT)])
def test_another_name_passes_beside_one_that_says_the_same(
    tokenizer: Tokenizer, name: str, path: str, body: dict[str, Any]
) -> None:
    cases = [
        ({"max_tokens": 4, name: 4}, 200),
        ({NEWER: 4, name: 4.0}, 200),
        ({"max_tokens": 4, name: 5}, 400),
        ({"max_tokens": 4, name: "4"}, 400),
        ({"max_tokens": 1, name: True}, 400),
        ({name: 4}, 400),
    ]
    if path != "/v1/completions":  # where the newer one is all that counts
        cases += [({"max_tokens": 9, NEWER: 4, name: 4}, 200), ({"max_tokens": 9, NEWER: 4, name: 9}, 400)]

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for fields, status in cases:
                answer = await http.post(path, json=body | fields)
                assert answer.status_code == status, (fields, answer.text)
                if status == 400:
                    assert answer.json()["error"]["message"] == f"{name}: is called max_tokens here"
                else:
                    assert served.engine.requests[-1].sampling.max_tokens == 4

    run(check())
