"""Where a prompt, a page, a chunk or an output ends exactly at another's edge: nothing shows, wherever pages are lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jdisagg.core.requests import EngineRequest, FinishReason, SamplingParams
from jdisagg.sched.states import Status
from tests.e2e.in_process.conftest import Runners
from tests.e2e.in_process.engines import Engine, Stream
from tests.e2e.in_process.loads import FAR_S
from tests.e2e.in_process.runners import MAX_LEN, PAGE
from tests.unit.engine.support import VOCAB, prompt_of

CHUNK = 8
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1)
EOS = 0
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": ((7, 3.0), (11, -5.0)), "temperature": 0.0},
    "min_tokens": {"min_tokens": 3, "logit_bias": ((EOS, 4.0),), "ignore_eos": False},
    "scored": {"logprobs": 20, "prompt_logprobs": 20},
    "stop ids": {"stop_token_ids": tuple(range(1, 40, 4)), "min_tokens": 2},
}


def request(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> EngineRequest:
    """A seeded request that asks for log-probabilities."""
    params = SamplingParams(**{"seed": 3, "logprobs": 2, "ignore_eos": True, "max_tokens": max_tokens} | sampling)
    return EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params, deadline_s=FAR_S)


@pytest.fixture(scope="module")
def asked() -> list[EngineRequest]:
    """Every feature at every length; outputs that end one token before a page's edge, at it, and one token behind it."""
    requests = []
    for (feature, sampling), length in itertools.product(FEATURES.items(), LENGTHS):
        to_edge = PAGE + -length % PAGE
        for max_tokens in (to_edge - 1, to_edge, to_edge + 1):
            name = f"{feature}-{length}-{max_tokens}"
            requests.append(request(name, prompt_of(length, seed=length), max_tokens, **sampling))
    return requests


@pytest.fixture(scope="module")
def alone(exact: Runners, asked: list[EngineRequest]) -> dict[str, Stream]:
    """Each by itself, its prompt in one chunk."""
    engine = Engine(exact.unified, max_num_batched_tokens=MAX_LEN)
    streams = {}
    for one in asked:
        streams |= engine.serve([one])
    assert "parts" not in engine.counters()
    assert len({token for stream in streams.values() for token in stream.tokens}) > VOCAB // 2
    return streams


class LosesPages:
    """Takes each running sequence's pages away once at every position it comes to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tick = engine.tick
        self._seen: set[tuple[str, int, int]] = set()
        engine.tick = self.tick  # type: ignore[method-assign]

    def tick(self, now_s: float) -> bool:
        """Before a tick; a copy to the host would have to be part of a plan, so none may be wanted."""
        table = self._engine.scheduler._table
        for sequence in table.queues[Status.RUNNING]:
            position = sequence.request_id, sequence.num_computed, sequence.num_known
            if sequence.num_computed and position not in self._seen:
                self._seen.add(position)
                assert table.preempt(sequence, sequence) is None
        return self._tick(now_s)


def assert_same(wanted: dict[str, Stream], got: dict[str, Stream]) -> None:
    assert [name for name in wanted if got[name].essence != wanted[name].essence] == []


@pytest.mark.covers("I-6", "V12")
@pytest.mark.parametrize("caching", [False, True])
def test_pages_lost_at_every_position_do_not_show(
    exact: Runners, asked: list[EngineRequest], alone: dict[str, Stream], caching: bool
) -> None:
    engine = Engine(exact.unified, long_prefill_token_threshold=CHUNK, caching=caching)
    LosesPages(engine)
    assert_same(alone, engine.serve(asked))
    print(f"\ncaching {caching}: {engine.counters()}")
    assert engine.scheduler.stats.preemptions > 3 * len(asked)


@pytest.mark.covers("I-6", "D19")
def test_pages_lost_at_every_position_of_a_decode_worker_do_not_show(
    exact: Runners, asked: list[EngineRequest], alone: dict[str, Stream]
) -> None:
    pair = exact.make_pair(prefill={"long_prefill_token_threshold": CHUNK}, decode={"num_scheduler_steps": 1})
    LosesPages(pair.decode)
    try:
        got = pair.serve(asked)
    finally:
        pair.close()
    assert_same(alone, got)
    print(f"\nP {pair.prefill.counters()}, D {pair.decode.counters()}")
    assert pair.decode.scheduler.stats.retractions > 2 * len(asked)


@pytest.mark.covers("I-6")
@pytest.mark.parametrize("options", [{}, {"num_scheduler_steps": 8}, {"scheduling_policy": "prefill-first"}], ids=str)
def test_chunks_and_neighbours_do_not_show(
    exact: Runners, asked: list[EngineRequest], alone: dict[str, Stream], options: dict[str, Any]
) -> None:
    engine = Engine(exact.unified, long_prefill_token_threshold=CHUNK, **options)
    assert_same(alone, engine.serve(asked, per_tick=0.5))
    assert engine.counters()["longest_chunk"] <= CHUNK


@pytest.mark.parametrize("chunk", [1, 7, CHUNK, 16])
def test_prompt_logprobs_are_those_of_an_unchunked_prompt(exact: Runners, chunk: int) -> None:
    requests = [request(f"p{n}", prompt_of(n, seed=n), 2, prompt_logprobs=5) for n in (1, 2, 7, 8, 9, 15, 16, 17, 33)]
    wanted = {
        name: s for one in requests for name, s in Engine(exact.unified, max_num_batched_tokens=MAX_LEN).serve([one]).items()
    }
    engine = Engine(exact.unified, long_prefill_token_threshold=chunk)
    got = engine.serve(requests)
    assert_same(wanted, got)
    assert engine.counters()["longest_chunk"] == chunk
    for one in requests:
        scored = got[one.request_id].prompt_logprobs
        assert [entry.token_id if entry else None for entry in scored] == [None, *one.prompt_token_ids[1:]]


def end_of(streams: dict[str, Stream]) -> tuple[int, FinishReason | None]:
    """Tokens and finish reason of the only one."""
    (stream,) = streams.values()
    return len(stream.tokens), stream.finish


@pytest.mark.parametrize("length", LENGTHS)
def test_one_token_is_one_token(exact: Runners, length: int) -> None:
    one = request("one", prompt_of(length), 1)
    assert end_of(Engine(exact.unified, num_scheduler_steps=8).serve([one])) == (1, FinishReason.LENGTH)
    pair = exact.make_pair()
    try:
        assert end_of(pair.serve([one])) == (1, FinishReason.LENGTH)
    finally:
        pair.close()


@pytest.mark.parametrize("num_scheduler_steps", [1, 8])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, PAGE, PAGE + 1, 9])
def test_eos_is_held_back_until_exactly_min_tokens(exact: Runners, min_tokens: int, num_scheduler_steps: int) -> None:
    bias = {"logit_bias": ((EOS, 100.0),), "ignore_eos": False, "min_tokens": min_tokens}
    engine = Engine(exact.unified, num_scheduler_steps=num_scheduler_steps)
    (stream,) = engine.serve([request("r", prompt_of(5), 12, **bias)]).values()
    assert stream.tokens.count(EOS) == 1
    assert stream.tokens[-1] == EOS
    assert stream.stop_token_id == EOS
    assert stream.finish is FinishReason.STOP
    assert len(stream.tokens) == min_tokens + 1
