"""The second turn of a chat finds what the first left: exactly the full pages they share, and says so in its usage."""

from __future__ import annotations

import asyncio
import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jdisagg.batch.local import open_local
from jdisagg.core.config import CacheConfig, Config, LocalPrefill, ModelConfig, Numerics, SchedulerConfig, TransferConfig
from jdisagg.core.requests import EngineRequest, SamplingParams
from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine
from tests.e2e.in_process.loads import FAR_S
from tests.e2e.in_process.runners import PAGE
from tests.unit.engine.support import prompt_of

CHAT_PAGE = 16
QUESTION = "Tell me about lists, tuples and sets, and when to use each of them. " * 4


def turns(length: int, max_tokens: int) -> tuple[EngineRequest, EngineRequest]:
    """A first turn, and what comes after its answer is known (appended by the caller)."""
    sampling = SamplingParams(seed=2, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    first = EngineRequest(request_id="t1", prompt_token_ids=tuple(prompt_of(length)), sampling=sampling, deadline_s=FAR_S)
    return first, EngineRequest(request_id="t2", prompt_token_ids=first.prompt_token_ids, sampling=sampling, deadline_s=FAR_S)


def with_answer(second: EngineRequest, answer: list[int]) -> EngineRequest:
    """The whole conversation and a new question."""
    return replace(second, prompt_token_ids=(*second.prompt_token_ids, *answer, 5, 6, 7))


@pytest.mark.parametrize(("length", "max_tokens"), [(5, 3), (8, 4), (8, 5), (21, 12), (1, 1)])
@pytest.mark.parametrize("kind", ["unified", "pair", "mirror"])
def test_the_second_turn_reuses_every_full_page_of_the_first(exact: Runners, kind: str, length: int, max_tokens: int) -> None:
    """On a pair with the mirror, P also fetches from D what it lacks of them instead of computing it."""
    want_min_tokens = 1 if kind == "mirror" else 0
    pair = exact.make_pair(prefill={"caching": True}, decode={"caching": True}, want_min_tokens=want_min_tokens)
    unified = Engine(exact.unified, caching=True)
    front = unified if kind == "unified" else pair
    try:
        first, second = turns(length, max_tokens)
        answer = front.serve([first])["t1"].tokens
        second = with_answer(second, answer)
        computed_before = pair.prefill.scheduler.stats.prefill_tokens
        got = front.serve([second])["t2"]
    finally:
        pair.close()
    with_kv = length + max_tokens - 1  # the last token of an answer is never fed
    shared = with_kv // PAGE * PAGE
    if kind != "unified" and max_tokens == 1:
        shared = length // PAGE * PAGE  # nothing was sent to D; P has the prompt
    at_p = length // PAGE * PAGE if kind == "pair" else shared
    assert got.cached_tokens == at_p, "what nobody computed again"
    assert got.essence == Engine(exact.unified).serve([second])["t2"].essence
    if kind != "unified":
        assert pair.decode.scheduler.stats.prefill_tokens == 0
        computed = pair.prefill.scheduler.stats.prefill_tokens - computed_before
        assert computed == len(second.prompt_token_ids) - at_p


@pytest.mark.covers("P07")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefill_engine_one_step_ahead_or_in_lockstep_gives_the_same_tokens(exact: Runners, overlap: bool) -> None:
    requests = [replace(turns(length, 8)[0], request_id=f"r{length}") for length in (3, 24, 25, 50, 61)]
    pair = exact.make_pair(prefill={"overlap": overlap, "caching": True}, want_min_tokens=1)
    try:
        got = pair.serve(requests)  # ends with the self-check of both engines
        planned_ahead = pair.prefill.counters().get("overlapped", 0)
    finally:
        pair.close()
    assert (planned_ahead > 0) is overlap
    wanted = Engine(exact.unified).serve(requests)
    assert {name: stream.essence for name, stream in got.items()} == {name: one.essence for name, one in wanted.items()}


async def chat(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> dict[str, Any]:
    response = await client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    )
    assert response.status_code == 200, response.text
    return response.json()


async def tokenized(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> list[int]:
    response = await client.post("/tokenize", json={"model": "tiny", "messages": messages})
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


async def observed(client: httpx.AsyncClient) -> dict[str, float]:
    """How many lives of requests, and of each phase, were observed."""
    text = (await client.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(jdisagg_request_\w*seconds_count) (\S+)$", text, re.MULTILINE)}


async def two_turns(config: Config) -> tuple[int, int]:
    """Cached tokens of the second turn asked once more, and those it must have had."""
    question = [{"role": "user", "content": QUESTION}]
    async with open_local(config, httpx.Timeout(60)) as client:
        assert gc.get_freeze_count() > 100_000, "what jax made is walked by every search for garbage"
        first = await chat(client, question)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = first["choices"][0]["message"]
        longer = [*question, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "And dicts?"}]
        before, after = await tokenized(client, question), await tokenized(client, longer)
        assert first["usage"]["prompt_tokens"] == len(before)
        alike = next(i for i, (one, two) in enumerate(zip([*before, -1], after, strict=False)) if one != two)
        cached = (await chat(client, longer))["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(f"\n{config.role}: {len(before)} and {len(after)} prompt tokens, {cached} cached")
        again = (await chat(client, longer))["usage"]["prompt_tokens_details"]["cached_tokens"]
        counts = await observed(client)
        assert set(counts.values()) <= {3, 0}, f"of three requests, by one of the engines: {counts}"
        assert counts["jdisagg_request_seconds_count"] == 3
        assert alike > 3 * CHAT_PAGE
        assert cached % CHAT_PAGE == 0
        # The answer's own tokens are found again when its text is tokenized to the same ids.
        assert alike // CHAT_PAGE * CHAT_PAGE <= cached <= (len(before) + 19) // CHAT_PAGE * CHAT_PAGE
        return again, (len(after) - 1) // CHAT_PAGE * CHAT_PAGE  # one must be computed again, for its logits


@pytest.mark.parametrize("role", ["unified", "colocated"])
def test_usage_over_http_counts_the_cached_tokens_of_a_second_turn(role: str, tiny_model: Path) -> None:
    config = Config(
        role=role,
        model=ModelConfig(model=str(tiny_model), served_model_name="tiny", numerics=Numerics.EXACT, max_model_len=256),
        cache=CacheConfig(page_size=CHAT_PAGE, num_pages=100),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        transfer=TransferConfig(transfer_chunk_tokens=64, local_prefill=LocalPrefill.NEVER),
    )
    thresholds = gc.get_threshold()
    again, wanted = asyncio.run(asyncio.wait_for(two_turns(config), 300))
    assert again == wanted
    assert gc.get_freeze_count() == 0, "an engine that is closed is garbage"
    assert gc.get_threshold() == thresholds, "the process is searched as it was"
