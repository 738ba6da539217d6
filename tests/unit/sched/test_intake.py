"""What is refused at the door, with the number that would work; and everything that ends a request early."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.config import LEAST_MODEL_LEN, SchedulerConfig
from jdisagg.core.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from jdisagg.core.requests import FinishReason, Role
from jdisagg.sched.scheduler import Scheduler
from tests.unit.sched.engine_fake import EOS, FakeEngine, expected, request


@pytest.mark.covers("X02", "X27")
def test_what_could_never_fit_is_refused_with_the_number_to_use() -> None:
    engine = FakeEngine(num_pages=11, max_model_len=64)  # 40 tokens of KV
    with pytest.raises(InvalidRequest, match="use max_tokens <= 14"):
        engine.add(request("a", (1,) * 50, 20))
    with pytest.raises(InvalidRequest, match="shorten the prompt to 63 tokens"):
        engine.add(request("a", (1,) * 64, 1))
    with pytest.raises(InvalidRequest, match="KV pool holds 40 tokens: use max_tokens <= 20"):
        engine.add(request("a", (1,) * 20, 22))
    engine.add(request("a", (1,) * 20, 21))  # the last token needs no KV
    engine.run()
    assert len(engine.seen["a"].tokens) == 21


@pytest.mark.covers("V06")
def test_a_request_may_fill_the_context_to_the_last_token() -> None:
    engine = FakeEngine(max_model_len=20)
    engine.add(request("a", (1,) * 15, 5), request("b", (1,) * 19, 1))
    with pytest.raises(InvalidRequest):
        engine.add(request("c", (1,) * 15, 6))
    engine.run()
    assert engine.seen["a"].tokens == expected((1,) * 15, 5)
    assert len(engine.seen["b"].tokens) == 1


@pytest.mark.parametrize(
    "bad",
    [
        request("a", ()),
        request("a", (1,), -1),
        request("a", (1,), 2, min_tokens=3),
        request("a", (1,), 2, generated=(1, 2, 3)),
    ],
    ids=["empty", "negative", "min-over-max", "generated-over-max"],
)
def test_contradictory_requests_are_refused(bad: Any) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequest):
        engine.add(bad)
    assert engine.scheduler.is_idle()


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
@pytest.mark.parametrize(
    "bad",
    [
        request("a", (1, -3) * 20, 2),
        request("a", (1, 2**31), 2),
        request("a", (1,), 4, generated=(-1,)),
        request("a", (1,), 2, stop_token_ids=(2**31,)),
        request("a", (1,), 2, stop_token_ids=tuple(range(1, 70))),
        request("a", (1,), 2**31 - 1),
        request("a", (1,), 2, logprobs=21),
        request("a", (1,), 2, prompt_logprobs=-1),
    ],
    ids=["negative", "wide", "generated", "wide-stop", "many-stops", "max-tokens", "logprobs", "prompt-logprobs"],
)
def test_what_no_step_could_take_is_refused_alone(bad: Any, role: Role) -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 40, "eos_token_ids": (EOS,)}
    scheduler = Scheduler(SchedulerConfig(), role=role, **sizes)
    with pytest.raises(InvalidRequest):
        scheduler.add(bad, 0.0)
    assert scheduler.is_idle()


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    sizes = {"max_model_len": 64, "page_size": 4, "num_pages": 40, "eos_token_ids": (EOS,), "vocab_size": 100}
    scheduler = Scheduler(SchedulerConfig(), role=Role.UNIFIED, **sizes)
    with pytest.raises(InvalidRequest, match=r"\[0, 100\).*got 100"):
        scheduler.add(request("a", (99, 100), 2), 0.0)
    scheduler.add(request("a", (99, 0), 2), 0.0)


def test_a_live_id_is_refused_and_free_again_afterwards() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2)))
    with pytest.raises(InvalidRequest, match="live already"):
        engine.add(request("a", (1, 2)))
    engine.scheduler.cancel("a")
    engine.add(request("a", (1, 2)))
    engine.run()
    assert engine.seen["a"].tokens == expected((1, 2), 4)


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine(max_num_seqs=2, max_queue_len=2)
    engine.add(*(request(name, (1,)) for name in "abcd"))  # two of them need not wait
    with pytest.raises(Overloaded) as caught:
        engine.add(request("e", (1,)))
    assert caught.value.retry_after_s > 0
    engine.run()
    assert set(engine.seen) == {"a", "b", "c", "d"}


@pytest.mark.covers("H16")
def test_draining_refuses_new_ones_and_finishes_the_accepted() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(request("running", (1, 2)), request("queued", (3, 4)))
    engine.tick()
    engine.scheduler.drain()
    with pytest.raises(Unavailable):
        engine.add(request("late", (1,)))
    engine.run()
    assert engine.seen["running"].tokens == expected((1, 2), 4)
    assert engine.seen["queued"].tokens == expected((3, 4), 4)


@pytest.mark.covers("D06", "D26")
def test_more_requests_than_slots_all_get_served_and_idle_means_idle() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(*(request(f"r{i}", (i + 1,), 3) for i in range(7)))
    assert not engine.scheduler.is_idle()
    engine.run()
    assert all(engine.seen[f"r{i}"].tokens == expected((i + 1,), 3) for i in range(7))


@pytest.mark.covers("D26")
def test_a_step_that_nobody_waits_for_any_more_keeps_it_from_being_idle() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2), 5))
    engine.step()
    engine.drop("a")
    engine.step()  # the device is told that the slot is free
    while engine.in_flight:
        assert not engine.scheduler.is_idle()
        engine.commit_one()
    assert engine.scheduler.is_idle()


@pytest.mark.covers("V34", "H10", "H11")
@pytest.mark.parametrize("after_ticks", range(6))
def test_cancel_at_any_moment_frees_everything_and_is_silent(after_ticks: int) -> None:
    engine = FakeEngine(max_num_seqs=1, max_num_batched_tokens=3)
    engine.add(request("a", tuple(range(1, 8)), 3), request("b", (4, 5), 6))
    for _ in range(after_ticks):
        engine.tick()
    got = len(engine.seen["a"].outputs) if "a" in engine.seen else 0
    assert "a" in engine.scheduler.table.live
    for name in ("a", "a", "never-seen"):
        engine.scheduler.cancel(name)
    engine.run()
    assert got == (len(engine.seen["a"].outputs) if "a" in engine.seen else 0)
    assert engine.seen["b"].tokens == expected((4, 5), 6)


def test_a_deadline_ends_its_request_alone_wherever_it_is() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(
        request("running", (1, 2), 50, deadline_s=5.0), request("queued", (1, 2), 50, deadline_s=4.0), request("b", (3,), 9)
    )
    for _ in range(8):
        engine.tick()
        engine.now_s += 1.0
    for name in ("running", "queued"):
        error = engine.seen[name].last.error
        assert error is not None
        assert error.grpc_status == "DEADLINE_EXCEEDED"
        assert engine.seen[name].last.finish is FinishReason.ERROR
    assert engine.seen["queued"].tokens == []
    engine.run()
    assert engine.seen["b"].tokens == expected((3,), 9)


@pytest.mark.parametrize("reads", [1, LEAST_MODEL_LEN - 1])
def test_a_read_budget_that_serves_nobody_is_refused_with_the_number_to_use(reads: int) -> None:
    with pytest.raises(ConfigError, match=f"max_num_kv_read_tokens is {reads}; use {LEAST_MODEL_LEN} or more, or 0"):
        FakeEngine(Role.UNIFIED, max_num_kv_read_tokens=reads)


@pytest.mark.parametrize("reads", [0, LEAST_MODEL_LEN])
def test_no_read_budget_and_the_smallest_one_are_taken(reads: int) -> None:
    engine = FakeEngine(Role.UNIFIED, max_num_kv_read_tokens=reads)
    engine.add(request("a", (1, 2), 3))
    engine.run()
    assert engine.seen["a"].tokens == expected((1, 2), 3)
