"""Seeds: those that requests bring, and what requests without one get (--seed)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.config import ModelConfig, ServerConfig
from jdisagg.core.requests import SamplingParams
from jdisagg.serve.text_edge import TextModel, make_edge
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving


def drawn(tokenizer: Tokenizer, seed: int | None) -> list[int]:
    """Seeds of the first requests after a start."""

    async def ask() -> list[int]:
        text = TextModel(tokenizer=tokenizer, defaults=SamplingParams())
        edge = make_edge(FakeEngine(tokenizer, "fox"), text, ServerConfig(seed=seed), ModelConfig())
        asked = [TextRequest(request_id=f"r{i}", prompts=("the",), sampling=SamplingParams()) for i in range(4)]
        return [(await edge.admit(request)).requests[0].sampling.seed for request in asked]

    return asyncio.run(ask())


def test_with_a_seed_every_start_draws_the_same_and_without_one_another(tokenizer: Tokenizer) -> None:
    for seed in (0, 7):
        assert drawn(tokenizer, seed) == drawn(tokenizer, seed)
        assert len(set(drawn(tokenizer, seed))) == 4
    assert drawn(tokenizer, 0) != drawn(tokenizer, 7)
    assert drawn(tokenizer, None) != drawn(tokenizer, None)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})],
)
def test_minus_one_asks_for_a_drawn_seed_as_at_vllm_and_any_other_number_is_one(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for seed, wanted in ((None, 77), (-1, 77), (-1.0, 77), (0, 0), (-2, 2**32 - 2), (2**32 - 1, 2**32 - 1)):
                assert (await http.post(path, json=fields | {"seed": seed})).status_code == 200
                assert served.engine.requests[-1].sampling.seed == wanted, seed

    run(check())
