"""A client that is slower than the engine gets several tokens in one delta: the same ones, in the same order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from jdisagg.api.generation.choice import MOST_JOINED, Delta, ScoredToken, in_fewer
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.errors import RequestError
from jdisagg.core.requests import FinishReason, Provenance, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run

ANSWER = "the quick brown fox jumps over the lazy dog\N{SNOWMAN}\N{GRINNING FACE} and stops " * 4


def added_up(deltas: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    """By choice: everything that its deltas say."""
    of_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        of_choice.setdefault(delta.index, []).append(delta)
    return {
        index: (
            "".join(delta.text for delta in mine),
            sum((delta.token_ids for delta in mine), ()),
            sum((delta.logprobs for delta in mine), ()),
            sum((delta.prompt_logprobs for delta in mine), ()),
            [delta.finish for delta in mine if delta.finish],
            [delta.stop for delta in mine if delta.stop is not None],
            [delta.provenance for delta in mine if delta.provenance][-1:],
            max(delta.cached_tokens for delta in mine),
            [delta.fingerprint for delta in mine if delta.fingerprint][-1:],
        )
        for index, mine in of_choice.items()
    }


@pytest.mark.parametrize("stop", [(), ("lazy dog\N{SNOWMAN}",)])
def test_a_reader_that_comes_late_gets_what_one_in_time_gets_in_fewer_deltas(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    async def read(*, late: bool) -> list[Delta]:
        engine = FakeEngine(tokenizer, ANSWER, ANSWER[9:], max_model_len=2000)
        edge = Edge(engine, tokenizer)
        sampling = SamplingParams(temperature=0, logprobs=2)
        asked = TextRequest(request_id="r", prompts=("the",), sampling=sampling, n=2, stop=stop, max_tokens=1000)
        deltas = list[Delta]()
        async for delta in edge.stream(await edge.admit(asked)):
            deltas.append(delta)
            while late and engine.live:
                await asyncio.sleep(0)
        return deltas

    in_time, late = run(read(late=False)), run(read(late=True))
    assert added_up(late) == added_up(in_time)
    assert len(late) < len(in_time) / 4
    assert max(len(delta.token_ids) for delta in late) <= MOST_JOINED
    assert all(len(delta.token_ids) <= 1 for delta in in_time), "who keeps up gets each token as it comes"


def test_whatever_comes_together_adds_up_to_the_same_and_nothing_passes_an_error() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        items = list[Delta | RequestError]()
        for _ in range(draw.randint(2, 30)):
            if draw.random() < 0.05:
                items.append(RequestError("the other choice failed"))
                continue
            token_ids = tuple(draw.choices(range(100), k=draw.choice([0, 1, 1, 1, 2, MOST_JOINED])))
            items.append(
                Delta(
                    index=draw.randrange(3),
                    text=draw.choice(["", "a", "bc"]),
                    token_ids=token_ids,
                    logprobs=tuple(ScoredToken(token_id=token_id, logprob=-1.0) for token_id in token_ids),
                    provenance=draw.choice([None, None, Provenance(prefilled_tokens=draw.randrange(9))]),
                    cached_tokens=draw.choice([0, 3]),
                    fingerprint=draw.choice([None, "one", "other"]),
                )
            )
        items.append(Delta(index=3, finish=FinishReason.LENGTH))
        fewer = in_fewer(items)
        assert [item for item in fewer if isinstance(item, RequestError)] == [
            item for item in items if isinstance(item, RequestError)
        ]
        for part, whole in zip(between_errors(fewer), between_errors(items), strict=True):
            assert added_up(part) == added_up(whole)
            assert len(part) <= len(whole)


def between_errors(items: Sequence[Delta | RequestError]) -> list[list[Delta]]:
    parts: list[list[Delta]] = [[]]
    for item in items:
        if isinstance(item, Delta):
            parts[-1].append(item)
        else:
            parts.append([])
    return parts
