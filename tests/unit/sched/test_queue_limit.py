"""A full queue refuses with the time after which a place should be free, as fast as places were seen to come free."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.core.requests import FinishReason, Role
from jdisagg.sched.queue_limit import MOST_GROUPS, UNKNOWN_RETRY_S
from jdisagg.sched.retry import MAX_RETRY_S, MIN_RETRY_S
from tests.unit.sched.engine_fake import FakeEngine, request


def refused_s(engine: FakeEngine, *, num_asked: int = 1, **options: Any) -> float:
    with pytest.raises(Overloaded, match="max_queue_len") as caught:
        engine.add(request("one-too-many", (1, 2), 3, num_asked=num_asked, **options))
    assert f"retry in {caught.value.retry_after_s:.1f} s" in caught.value.message
    return caught.value.retry_after_s


def under_load(seconds_per_request: float, num_requests: int = 12) -> FakeEngine:
    """One slot, two tokens per request; the queue is full again after every request that left it."""
    engine = FakeEngine(max_num_seqs=1, max_queue_len=4)
    added = 0
    for _ in range(num_requests):
        while sum(engine.scheduler.counts()[state] for state in ("waiting", "prealloc")) < 4:
            engine.add(request(f"r{added}", (1, added + 2), 2))
            added += 1
        left = engine.scheduler.counts()["waiting"]
        while engine.scheduler.counts()["waiting"] == left:  # three ticks: two steps, and one to learn of the end
            engine.tick()
            engine.now_s += seconds_per_request / 3
    while engine.scheduler.counts()["waiting"] < 4:
        engine.add(request(f"r{added}", (1, added + 2), 2))
        added += 1
    return engine


def test_who_asked_several_workers_is_promised_its_share_of_a_place_at_each() -> None:
    engine = under_load(1.0)
    place_s = -refused_s(engine) + refused_s(engine)
    times = [refused_s(engine, num_asked=4) for _ in range(5)]
    assert [after - before for before, after in pairwise(times)] == [pytest.approx(place_s / 4)] * 4


def test_choices_that_would_share_a_place_are_promised_one() -> None:
    engine = under_load(1.0)
    place_s = -refused_s(engine) + refused_s(engine)
    first_s, *rest = (refused_s(engine, fork_group="a") for _ in range(8))
    assert rest == [pytest.approx(first_s)] * 7
    assert refused_s(engine, fork_group="b") == pytest.approx(first_s + place_s)
    assert refused_s(engine) == pytest.approx(first_s + 2 * place_s)
    engine.now_s += 0.5
    assert refused_s(engine, fork_group="a") == pytest.approx(first_s - 0.5), "it is the same place, and nearer"
    engine.now_s += first_s
    assert refused_s(engine, fork_group="a") > 2 * place_s, "it came free, and was not taken"


def test_choices_that_would_take_a_place_each_are_promised_as_many() -> None:
    engine = under_load(1.0)
    times = [refused_s(engine, fork_group="a", prompt_logprobs=0) for _ in range(3)]
    assert [after - before for before, after in pairwise(times)] == [pytest.approx(times[0])] * 2


def test_choices_of_many_calls_take_no_memory_when_they_are_refused() -> None:
    engine = under_load(0.3)
    for number in range(1000):
        refused_s(engine, fork_group=f"g{number}")
    assert len(engine.scheduler._arrivals._queue_limit._promised_s) == MOST_GROUPS


def test_without_any_experience_it_is_a_second() -> None:
    engine = FakeEngine(max_num_seqs=1, max_queue_len=1)
    engine.add(request("a", (1,), 1), request("b", (1,), 1))
    assert refused_s(engine) == UNKNOWN_RETRY_S
    engine.run()


@pytest.mark.parametrize("seconds_per_request", [0.3, 3.0])
def test_it_is_the_time_in_which_one_request_leaves_the_queue(seconds_per_request: float) -> None:
    engine = under_load(seconds_per_request)
    assert refused_s(engine) == pytest.approx(seconds_per_request, rel=0.2)


def test_those_refused_are_spread_over_the_places_to_come() -> None:
    engine = under_load(0.3)
    first, *rest = (refused_s(engine) for _ in range(5))
    assert rest == pytest.approx([first * k for k in (2, 3, 4, 5)])
    engine.now_s += 100.0  # promises are over
    assert refused_s(engine) >= first


def test_it_is_bounded() -> None:
    assert refused_s(under_load(0.003)) == MIN_RETRY_S
    slow = under_load(200.0)
    assert MAX_RETRY_S / 2 <= refused_s(slow) <= MAX_RETRY_S
    stuck = under_load(0.3)
    stuck.now_s += 1000.0
    assert MAX_RETRY_S / 2 <= refused_s(stuck) <= MAX_RETRY_S


def test_those_whom_no_place_is_promised_do_not_come_again_all_at_once() -> None:
    engine = under_load(1.0)
    place_s = -refused_s(engine) + refused_s(engine)
    while refused_s(engine) < MAX_RETRY_S - place_s:
        pass
    times = sorted(refused_s(engine) for _ in range(200))
    assert times[0] == pytest.approx(MAX_RETRY_S / 2, abs=0.3)
    assert times[-1] <= MAX_RETRY_S
    assert max(after - before for before, after in pairwise(times)) < 0.3  # 15 s for 200 of them: 0.075 each if all were equal


def test_time_without_a_queue_says_nothing_about_the_rate() -> None:
    engine = under_load(0.3)
    usual = refused_s(engine)
    while not engine.scheduler.is_idle():
        engine.tick()
        engine.now_s += 0.1
    for _ in range(50):  # a quiet hour: one request at a time, never a queue
        engine.add(request(f"quiet{engine.now_s}", (1, 2), 2))
        engine.run()
        engine.now_s += 72.0
    for index in range(5):  # one of them for the slot
        engine.add(request(f"burst{index}", (1, 2), 2))
    assert refused_s(engine) == pytest.approx(usual, rel=0.2)
    engine.run()


def test_equal_histories_give_equal_times_on_every_role() -> None:
    for role, remote in ((Role.PREFILL, False), (Role.DECODE, True)):
        engine = FakeEngine(role, max_num_seqs=1, max_queue_len=2)
        for name in ("a", "b", "c"):
            engine.add(request(name, (1, 2), 3), **({"remote": True, "is_open": False} if remote else {}))
        assert refused_s(engine) == UNKNOWN_RETRY_S
    assert [refused_s(under_load(0.7)) for _ in range(2)] == [refused_s(under_load(0.7))] * 2


def remote(engine: FakeEngine, name: str) -> None:
    engine.scheduler.add(request(name, (1, 2, 3), 3), engine.now_s, remote=True)


def test_those_for_whom_a_slot_is_free_wait_for_their_peer_and_take_no_place_in_the_queue() -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=2, max_queue_len=2)
    remote(engine, "a")
    engine.tick()
    for name in ("b", "c", "d"):  # two for the slots, two in the queue, whatever plans were made meanwhile
        remote(engine, name)
        engine.tick()
    with pytest.raises(Overloaded, match="2 requests are waiting, max_queue_len is 2"):
        remote(engine, "e")
    engine.scheduler.peer_ready("a")
    engine.tick()
    assert engine.scheduler.counts()["transfer"] == 1
    with pytest.raises(Overloaded):  # "a" has its place in memory, its slot is still to come
        remote(engine, "e")
    engine.scheduler.cancel("a")
    engine.tick()
    remote(engine, "e")
    with pytest.raises(Overloaded):
        remote(engine, "f")


def test_a_stream_that_goes_on_after_another_worker_finds_a_place_in_a_full_queue() -> None:
    engine = FakeEngine(max_num_seqs=1, max_queue_len=1)
    engine.add(request("a", (1,), 1), request("b", (1,), 1))
    engine.tick()
    refused_s(engine)
    engine.add(request("goes-on", (1, 2), 3, generated=(5,)))
    engine.add(request("told-elsewhere", (1, 2), 3), goes_on=True)
    refused_s(engine)
    engine.run()
    assert engine.seen["goes-on"].last.finish is engine.seen["told-elsewhere"].last.finish is FinishReason.LENGTH
    assert len(engine.seen["told-elsewhere"].tokens) == 3
