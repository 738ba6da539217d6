"""`prompt_logprobs` of a chat: its prompt as the template wrote it, scored once beside all choices."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2}


@pytest.mark.parametrize("num_top", [0, 2])
def test_a_chat_s_prompt_is_scored_in_the_form_that_completions_have(tokenizer: Tokenizer, num_top: int) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            chat = await http.post("/v1/chat/completions", json=CHAT | {"prompt_logprobs": num_top})
            prompt = list(served.engine.requests[0].prompt_token_ids)
            assert [request.sampling.prompt_logprobs for request in served.engine.requests] == [num_top] * 2
            completion = {"prompt": prompt, "prompt_logprobs": num_top}
            scored = (await http.post("/v1/completions", json=completion)).json()["choices"][0]["prompt_logprobs"]
            assert chat.json()["prompt_logprobs"] == scored
            assert [entry and str(one) in entry for one, entry in zip(prompt, scored, strict=True)][1:] == [True] * len(
                prompt[1:]
            )
            assert "prompt_logprobs" not in (await http.post("/v1/chat/completions", json=CHAT)).json()

    run(check())


def test_a_chat_that_streams_has_no_place_for_them(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for value, stream, status in (
                (0, True, 400),
                (0, False, 200),
                (None, True, 200),
                (21, False, 400),
                (-1, False, 400),
            ):
                asked = CHAT | {"prompt_logprobs": value, "stream": stream}
                answer = await http.post("/v1/chat/completions", json=asked)
                assert answer.status_code == status, (value, stream, answer.text)
                if status == 400:
                    assert answer.json()["error"]["param"] == "prompt_logprobs"

    run(check())
