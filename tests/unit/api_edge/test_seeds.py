"""--seed: what requests that bring no seed get."""

from __future__ import annotations

import asyncio

from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.config import ModelConfig, ServerConfig
from jdisagg.core.requests import SamplingParams
from jdisagg.serve.text_edge import TextModel, make_edge
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine


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
