"""In `exact`, nothing the scheduler decides shows in a stream: tokens, ends and log-probabilities are equal to the last bit.

One reference run, then the same requests under every policy, bound and shortage. Each condition shows that it took place: its
counters are printed and asserted. JDISAGG_MIXED_COUNT asks for more requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from jdisagg.core.config import LocalPrefill
from jdisagg.core.requests import EngineRequest, FinishReason, SamplingParams
from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine, Stream
from tests.e2e.in_process.loads import FAR_S, choices, engine_requests, long_outputs
from tests.e2e.in_process.runners import MAX_LEN, PAGE
from tests.unit.engine.support import VOCAB

COUNT = int(os.environ.get("JDISAGG_MIXED_COUNT", "60"))
SMALL = 27  # pages of 4 tokens; the longest request needs 24
HOST_KV_BYTES = 64 * 2**20
Streams = dict[str, Stream]
Happened = Callable[[dict[str, int]], bool]

CONDITIONS: dict[str, tuple[dict[str, Any], Happened]] = {
    "every step is committed before the next is planned": ({"overlap": False}, lambda c: "overlapped" not in c),
    "8 steps a dispatch": ({"num_scheduler_steps": 8}, lambda c: c["multi_step"] > 30),
    "priority": ({"scheduling_policy": "priority"}, lambda c: c["admitted_out_of_order"] > 10),
    "priority, no ageing, 2 slots": (
        {"scheduling_policy": "priority", "priority_aging_s": 0.0, "max_num_seqs": 2},
        lambda c: c["admitted_out_of_order"] > 10,
    ),
    "prefill-first": ({"scheduling_policy": "prefill-first"}, lambda c: c["prompts_alone"] > 10),
    "few reads": ({"max_num_kv_read_tokens": 100}, lambda c: c["most_reads"] <= 100),
    "margin": ({"safety_margin": 0.3, "num_pages": 60}, lambda c: c["steps_below_margin"] > 20),
    "chunks of 7": ({"long_prefill_token_threshold": 7}, lambda c: c["longest_chunk"] <= 7),
    "no chunks": ({"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_LEN}, lambda c: "parts" not in c),
    "preemption": ({"num_pages": SMALL}, lambda c: c["preemptions"] > 100 and "offloads" not in c),
    "preemption, caching": (
        {"num_pages": SMALL, "caching": True},
        lambda c: c["preemptions"] > 100 and c["refound_tokens"] > 100,
    ),
    "preemption through host memory": (
        {"num_pages": SMALL, "host_kv_bytes": HOST_KV_BYTES},
        lambda c: c["offloads"] > 100 and c["restores"] > 100,
    ),
    "all at once": (
        {
            "num_pages": SMALL + 5,
            "host_kv_bytes": 64 * 1024,
            "caching": True,
            "scheduling_policy": "priority",
            "num_scheduler_steps": 8,
            "max_num_kv_read_tokens": 150,
            "safety_margin": 0.1,
            "long_prefill_token_threshold": 7,
            "max_bypass": 2,
        },
        lambda c: min(c["offloads"], c["preemptions"] - c["offloads"], c["forks"], c["refound_tokens"]) > 0,
    ),
}


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    mixed = engine_requests(COUNT, vocab_size=VOCAB, max_model_len=MAX_LEN)
    long = long_outputs(40, vocab_size=VOCAB)
    return [one for two in zip(mixed, [*long, *[None] * len(mixed)], strict=False) for one in two if one is not None]


@pytest.fixture(scope="module")
def reference(exact: Runners, requests: list[EngineRequest]) -> Streams:
    engine = Engine(exact.unified)
    streams = engine.serve(requests)
    counters = engine.counters()
    print(f"\n{len(requests)} sequences; reference: {counters}")
    assert "preemptions" not in counters
    assert counters["overlapped"] > 100
    assert counters["longest_chunk"] > 7
    assert counters["most_reads"] > 100
    return streams


def differing(wanted: Streams, got: Streams) -> list[str]:
    """Requests whose streams are not equal."""
    assert wanted.keys() == got.keys()
    return [name for name, stream in wanted.items() if got[name].essence != stream.essence]


def test_the_load_is_worth_comparing(requests: list[EngineRequest], reference: Streams) -> None:
    streams = reference.values()
    assert len({token for stream in streams for token in stream.tokens}) > 0.8 * VOCAB
    assert {stream.finish for stream in streams} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({entry.logprob for stream in streams for entry in stream.logprobs}) > 500
    assert sum(len(stream.prompt_logprobs) for stream in streams) > 50
    names = [field.name for field in fields(SamplingParams)]
    plain = SamplingParams()
    unused = [name for name in names if all(getattr(one.sampling, name) == getattr(plain, name) for one in requests)]
    assert unused == []
    for one in requests:
        tokens, sampling = reference[one.request_id].tokens, one.sampling
        assert sampling.min_tokens <= len(tokens) <= sampling.max_tokens


@pytest.mark.covers("I-6", "D25")
@pytest.mark.parametrize("name", CONDITIONS)
def test_streams_are_equal_whatever_the_scheduler_does(
    name: str, exact: Runners, requests: list[EngineRequest], reference: Streams
) -> None:
    options, happened = CONDITIONS[name]
    engine = Engine(exact.unified, **options)
    got = engine.serve(requests, per_tick=0.2 if "num_scheduler_steps" in options else 2)
    counters = engine.counters()
    print(f"\n{name}: {counters}")
    assert differing(reference, got) == []
    assert happened(counters), counters


@pytest.fixture(scope="module")
def alike() -> list[EngineRequest]:
    return engine_requests(24, vocab_size=VOCAB, max_model_len=MAX_LEN, seed=5, shared_prefix=True)


@pytest.mark.covers("I-6")
@pytest.mark.parametrize("caching", [True, False])
def test_prompts_that_begin_alike_are_equal_with_and_without_the_cache(
    exact: Runners, alike: list[EngineRequest], caching: bool
) -> None:
    wanted = Engine(exact.unified).serve(alike)
    engine = Engine(exact.unified, caching=caching)
    for per_tick in (2, 5):
        assert differing(wanted, engine.serve(alike, per_tick=per_tick)) == []
    print(f"\ncaching {caching}: {engine.counters()}")
    assert (engine.counters().get("prefix_hit_tokens", 0) > 300) is caching


@pytest.mark.covers("I-6")
def test_prompts_that_begin_alike_are_equal_with_caches_on_both_sides_of_a_pair(
    exact: Runners, alike: list[EngineRequest]
) -> None:
    wanted = Engine(exact.unified).serve(alike)
    pair = exact.make_pair(prefill={"caching": True}, decode={"caching": True})
    try:
        for per_tick in (2, 5):
            assert differing(wanted, pair.serve(alike, per_tick=per_tick)) == []
    finally:
        pair.close()
    print(f"\nP {pair.prefill.counters()}, D {pair.decode.counters()}")
    assert pair.prefill.counters()["prefix_hit_tokens"] > 100
    assert pair.decode.counters()["prefix_hit_tokens"] > 100


PAIR_CONDITIONS: dict[str, tuple[dict[str, Any], Happened]] = {
    "ample": ({}, lambda c: c.get("retractions", 0) < 20),
    "8 steps a dispatch": ({"decode": {"num_scheduler_steps": 8}}, lambda c: c["multi_step"] > 10),
    "priority on both": (
        {"prefill": {"scheduling_policy": "priority"}, "decode": {"scheduling_policy": "priority"}},
        lambda c: c["admitted_out_of_order"] > 10,
    ),
    # about 120 retractions, which depends on when KV arrives: 99 and 147 were seen
    "retraction, fetched again": ({"decode": {"num_pages": SMALL}}, lambda c: c["retractions"] > 50 and "chunks" not in c),
    "retraction, computed again": (
        {"decode": {"num_pages": SMALL}, "local_prefill": LocalPrefill.ON_FAILURE},
        lambda c: c["retractions"] > 50 and c["chunks"] > 50,
    ),
    "retraction through host memory": (
        {"decode": {"num_pages": SMALL, "host_kv_bytes": HOST_KV_BYTES}},
        lambda c: c["offloads"] > 50 and c["restores"] > 50,
    ),
    "little memory on both": (
        {"prefill": {"num_pages": SMALL, "caching": True}, "decode": {"num_pages": SMALL, "caching": True}},
        lambda c: c["retractions"] > 50,
    ),
}
WAVE = 8  # requests that D gets while nothing else runs: once it has the KV of the last of them it only decodes


@pytest.mark.covers("I-6", "D19")
@pytest.mark.parametrize("name", PAIR_CONDITIONS)
def test_streams_of_a_pair_are_equal_whatever_its_schedulers_do(
    name: str, exact: Runners, requests: list[EngineRequest], reference: Streams
) -> None:
    options, happened = PAIR_CONDITIONS[name]
    size = WAVE if "8 steps" in name else len(requests)
    waves = [requests[first : first + size] for first in range(0, len(requests), size)]
    pair = exact.make_pair(**options)
    try:
        got = {one: stream for wave in waves for one, stream in pair.serve(wave).items()}
    finally:
        pair.close()
    counters = pair.decode.counters()
    print(f"\n{name}: P {pair.prefill.counters()}, D {counters}")
    assert differing(reference, got) == []
    assert happened(counters), counters


@pytest.mark.covers("H09", "I-6")
@pytest.mark.parametrize("kind", ["unified", "pair"])
@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 30])
def test_eight_choices_are_eight_single_requests(exact: Runners, kind: str, length: int) -> None:
    prompt = tuple(random.Random(length).randrange(1, VOCAB) for _ in range(length))
    sampling = SamplingParams(seed=11, max_tokens=13, logprobs=2, presence_penalty=0.3, ignore_eos=True)
    one = EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling, deadline_s=FAR_S)
    singles = choices(one, 8, together=False)
    wanted = {name: stream for single in singles for name, stream in Engine(exact.unified).serve([single]).items()}
    assert len({tuple(stream.tokens) for stream in wanted.values()}) == 8
    pair = exact.make_pair()
    front = Engine(exact.unified) if kind == "unified" else pair.decode
    try:
        got = front.serve(choices(one, 8), per_tick=8) if kind == "unified" else pair.serve(choices(one, 8), per_tick=8)
    finally:
        pair.close()
    print(f"\n{kind}, prompt of {length}: {front.counters()}, peak {front.peak_pages} pages")
    assert differing(wanted, got) == []
    assert front.counters()["forks"] == 7
    assert front.peak_pages <= -(-length // PAGE) + 8 * -(-13 // PAGE) + 8
    computed = front if kind == "unified" else pair.prefill
    assert computed.scheduler.stats.prefill_tokens == length
