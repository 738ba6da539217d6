"""How long fetches from one peer may take, and what is remembered of those that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.handoff.line import FETCH_TIMEOUT_S, LATE_S, MOST_PATIENCE, SLOWEST_BYTES_PER_S, IncomingPiece, Inflow, Line
from tests.unit.handoff.rig import ready

FAR_S = 1e9


def piece(key: str = "a", backend: str = "tcp") -> IncomingPiece:
    return IncomingPiece(ready(key, 0, 4, backend=backend))


def line() -> Line:
    return Line("p", Inflow())


def test_a_time_out_says_that_time_was_short_when_something_came_meanwhile() -> None:
    one, first, second = line(), piece("a"), piece("b")
    for waiting in (first, second):
        one.begin(waiting, FAR_S, 1.0)
    one.failed(first, "timeout")
    assert one.patience == 1, "nothing came at all"
    one.end(first)
    one.arrived(first.ready, 2.0)
    late = piece("c")
    one.begin(late, FAR_S, 2.0)
    one.failed(late, "timeout")
    assert one.patience == 1, "nothing came since that one began"
    one.failed(second, "timeout")
    assert one.patience == 2


def test_a_failure_of_a_fetch_that_began_long_ago_takes_no_patience_back() -> None:
    one, old = line(), piece("old")
    one.begin(old, FAR_S, 0.0)
    for number in range(2):
        one.begin(again := piece(str(number)), FAR_S, 1.0)
        one.failed(again, "slow")
    assert one.patience == 4
    one.failed(old, "slow")
    assert one.patience == 4


def test_patience_has_an_end() -> None:
    one = line()
    for number in range(9):
        one.begin(slow := piece(str(number)), FAR_S, 1.0)
        one.failed(slow, "slow")
    assert one.patience == MOST_PATIENCE == 8
    one.begin(slow := piece("last"), FAR_S, 1.0)
    assert slow.fetch_deadline_s == 1.0 + 8 * FETCH_TIMEOUT_S


def test_who_waits_waits_from_the_first_fetch_on_until_nothing_is_fetched() -> None:
    one, first, second = line(), piece("a"), piece("b")
    one.wait_anew(0.5)
    assert one.waiting_s is None, "nobody waits"
    one.begin(first, FAR_S, 1.0)
    one.begin(second, FAR_S, 2.0)
    assert one.waiting_s == 1.0
    one.end(first)
    one.end(first)
    assert one.waiting_s == 1.0, "the other one is still fetched"
    one.end(second)
    assert one.waiting_s is None
    one.begin(first, FAR_S, 9.0)
    assert one.waiting_s == 9.0
    one.begin(first, FAR_S, 10.0)  # once more
    assert one.waiting_s == 9.0
    assert one.queued_bytes == first.ready.num_bytes
    one.wait_anew(11.0)
    assert one.waiting_s == 11.0


def test_lateness_is_counted_from_the_limit_on() -> None:
    one, waiting = line(), IncomingPiece(replace(ready("a", 0, 4), num_bytes=SLOWEST_BYTES_PER_S))
    one.begin(waiting, FAR_S, 10.0)
    limit_s = LATE_S + 1.0
    for patience in (1, 3):
        assert one.late_s(SLOWEST_BYTES_PER_S, 10.0 + patience * limit_s - 0.125, patience) == 0.0
        assert one.late_s(SLOWEST_BYTES_PER_S, 10.0 + patience * limit_s, patience) == patience * limit_s


@pytest.mark.parametrize("backend", ["tcp", "grpc"])
def test_stalls_are_counted_for_each_backend_and_forgotten_when_something_comes_over_it(backend: str) -> None:
    one = line()
    for name in ("tcp", "tcp", "grpc", "grpc"):
        one.begin(stalled := piece(backend=name), FAR_S, 1.0)
        one.failed(stalled, "stalled")
    assert one.is_dead("tcp")
    assert one.is_dead("grpc")
    one.arrived(ready("b", 0, 4, backend=backend), 2.0)
    assert [one.is_dead(name) for name in ("tcp", "grpc")] == [backend != "tcp", backend != "grpc"]
    assert one.patience == 1


def test_where_nothing_is_fetched_nothing_is_late() -> None:
    one = line()
    assert one.late_s(0, FAR_S) == 0.0
    one.begin(piece(), FAR_S, 1.0)
    assert one.late_s(0, 1.0 + LATE_S) == LATE_S
    assert one.late_s(0, 1.0 + LATE_S, patience=2) == 0.0
