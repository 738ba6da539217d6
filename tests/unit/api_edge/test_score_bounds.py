"""What one request may have scored is bounded: all of it is in memory at once."""

from __future__ import annotations

from typing import Any

import grpc.aio
import httpx
import pytest

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import TextRequest
from jdisagg.api.generation.scores import MAX_SCORES
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import FakeEngine, run, serving

LONG = (5,) * 130_000


def admitted(tokenizer: Tokenizer, sampling: SamplingParams, **fields: Any) -> list[int]:
    """max_tokens of the engine requests."""
    engine = FakeEngine(tokenizer, "a", max_model_len=131_072)
    asked = TextRequest(request_id="r", sampling=sampling, **fields)

    async def numbers() -> list[int]:  # alone: asyncio writes down what its first task returned
        return [request.sampling.max_tokens for request in (await Edge(engine, tokenizer).admit(asked)).requests]

    return run(numbers())


@pytest.mark.parametrize(
    ("num_prompts", "n", "alternatives", "is_served"),
    [
        (1, 1, 20, True),  # 2.86 M
        (1, 2, 20, False),
        (2, 1, 20, False),
        (12, 1, 0, True),  # 3.12 M
        (13, 1, 0, False),
        (1, 13, 0, False),
        (1, 8, 1, True),  # 3.12 M
        (1, 9, 1, False),
        (64, 16, None, True),
    ],
)
def test_scores_of_prompts_are_bounded_by_tokens_choices_and_alternatives(
    tokenizer: Tokenizer, num_prompts: int, n: int, alternatives: int | None, is_served: bool
) -> None:
    sampling = SamplingParams(prompt_logprobs=alternatives)
    asked: dict[str, Any] = {"prompts": (LONG,) * num_prompts, "n": n, "max_tokens": 1}
    if is_served:
        assert admitted(tokenizer, sampling, **asked) == [1] * (num_prompts * n)
        return
    with pytest.raises(InvalidRequest) as caught:
        admitted(tokenizer, sampling, **asked)
    assert alternatives is not None
    num = num_prompts * n * len(LONG) * (alternatives + 2)
    assert caught.value.field == "prompt_logprobs"
    assert caught.value.message == (
        f"prompt_logprobs: at most {MAX_SCORES} scores per request, which are its scored tokens times (alternatives + 2); got "
        f"{num}, send fewer prompts, or ask for fewer alternatives"
    )


def test_scores_of_answers_are_bounded_with_those_of_prompts(tokenizer: Tokenizer) -> None:
    both = SamplingParams(logprobs=18, prompt_logprobs=18)  # 20 scores a token
    most = (MAX_SCORES - 2 * 3 * 1000 * 20) // (2 * 3 * 20)
    asked: dict[str, Any] = {"prompts": ((5,) * 1000,) * 2, "n": 3}
    assert admitted(tokenizer, both, max_tokens=most, **asked) == [most] * 6
    with pytest.raises(InvalidRequest, match=f"max_tokens may be {most} .* got {most + 1}") as caught:
        admitted(tokenizer, both, max_tokens=most + 1, **asked)
    assert caught.value.field == "logprobs"
    assert admitted(tokenizer, SamplingParams(), max_tokens=130_000, **asked) == [130_000] * 6


def test_an_answer_of_no_stated_length_ends_where_its_scores_do(tokenizer: Tokenizer) -> None:
    most = MAX_SCORES // (64 * 22)
    assert admitted(tokenizer, SamplingParams(logprobs=20), prompts=((5,),), n=64) == [most] * 64
    assert admitted(tokenizer, SamplingParams(logprobs=20), prompts=((5,),)) == [131_071]
    assert admitted(tokenizer, SamplingParams(logprobs=20), prompts=((5,),), n=64, default_max_tokens=16) == [16] * 64


def test_it_is_refused_over_http_and_grpc_alike(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, "a", max_model_len=131_072)
    prompts = [[5] * 2047] * 72  # 3.24 M scores

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, timeout=60.0) as http:
            asked = {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 0}
            answer = await http.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
            message = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=LONG),
                n=2,
                sampling=common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=20),
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in served.stub.Generate(message):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith("prompt_logprobs: at most")

    run(check())
    assert engine.requests == []
