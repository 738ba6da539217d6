"""In `fast`, what the scheduler does may show in a bit and so in a token; nothing is lost, repeated or too long.

How many streams leave the reference is printed.
"""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.config import LocalPrefill
from jdisagg.core.requests import EngineRequest, FinishReason
from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine, Stream
from tests.e2e.in_process.loads import engine_requests, long_outputs
from tests.e2e.in_process.runners import MAX_LEN
from tests.unit.engine.support import VOCAB

SMALL = 27
UNIFIED: dict[str, dict[str, Any]] = {
    "lockstep": {"overlap": False},
    "8 steps a dispatch": {"num_scheduler_steps": 8},
    "priority": {"scheduling_policy": "priority"},
    "prefill-first": {"scheduling_policy": "prefill-first"},
    "few reads": {"max_num_kv_read_tokens": 100},
    "margin": {"safety_margin": 0.3, "num_pages": 60},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "preemption": {"num_pages": SMALL, "caching": True},
    "preemption through host memory": {"num_pages": SMALL, "host_kv_bytes": 2**26},
}
PAIR: dict[str, dict[str, Any]] = {
    "ample": {},
    "retraction, fetched again": {"decode": {"num_pages": SMALL}},
    "retraction, computed again": {"decode": {"num_pages": SMALL}, "local_prefill": LocalPrefill.ON_FAILURE},
    "retraction through host memory": {"decode": {"num_pages": SMALL, "host_kv_bytes": 2**26}},
}


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    return engine_requests(30, vocab_size=VOCAB, max_model_len=MAX_LEN) + long_outputs(15, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def reference(fast: Runners, requests: list[EngineRequest]) -> dict[str, Stream]:
    return Engine(fast.unified).serve(requests)


def check(name: str, requests: list[EngineRequest], wanted: dict[str, Stream], got: dict[str, Stream]) -> None:
    """Lengths and ends are legal; log-probabilities belong to their tokens; divergences are printed."""
    diverged = bits = 0
    for one in requests:
        stream, sampling = got[one.request_id], one.sampling
        assert sampling.min_tokens <= len(stream.tokens) <= sampling.max_tokens
        if stream.finish is FinishReason.LENGTH:
            assert len(stream.tokens) == sampling.max_tokens
        else:
            assert stream.finish is FinishReason.STOP
            assert stream.tokens[-1] == stream.stop_token_id
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (0,))}
        assert not ends & set(stream.tokens[sampling.min_tokens : -1]), f"{one.request_id} goes on after its end"
        if sampling.logprobs is not None:
            assert [entry.token_id for entry in stream.logprobs] == stream.tokens
        if sampling.prompt_logprobs is not None:
            scored = [entry.token_id if entry else None for entry in stream.prompt_logprobs]
            assert scored == [None, *one.prompt_token_ids[1:]]
        diverged += stream.tokens != wanted[one.request_id].tokens
        bits += stream.essence != wanted[one.request_id].essence
    print(f"\nfast, {name}: of {len(requests)} streams {diverged} leave the reference, {bits} differ at least in a bit")


@pytest.mark.parametrize("name", UNIFIED)
def test_nothing_is_lost_or_repeated(
    name: str, fast: Runners, requests: list[EngineRequest], reference: dict[str, Stream]
) -> None:
    engine = Engine(fast.unified, **UNIFIED[name])
    check(name, requests, reference, engine.serve(requests, per_tick=0.2 if "num_scheduler_steps" in UNIFIED[name] else 2))
    print(engine.counters())
    assert "num_scheduler_steps" not in UNIFIED[name] or engine.counters()["multi_step"] > 30
    assert "num_pages" not in UNIFIED[name] or engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("name", PAIR)
def test_nothing_is_lost_or_repeated_by_a_pair(
    name: str, fast: Runners, requests: list[EngineRequest], reference: dict[str, Stream]
) -> None:
    pair = fast.make_pair(**PAIR[name])
    try:
        check(f"P + D, {name}", requests, reference, pair.serve(requests))
    finally:
        pair.close()
    assert "decode" not in PAIR[name] or pair.decode.scheduler.stats.retractions > 0
