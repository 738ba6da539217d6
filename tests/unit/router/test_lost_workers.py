"""The last workers that were lost: how many are kept, for how long, and that one that is back is not among them."""

from __future__ import annotations

from jdisagg.core.fleet import Member
from jdisagg.router.lost_workers import KEPT_S, MOST_KEPT, LostWorkers
from tests.unit.wire.rig import member


def process(number: int) -> Member:
    return member(address=f"h:{number}", worker=f"pid {number} @ h:{number}", epoch=f"e{number}")


def named(lost: LostWorkers, now_s: float) -> list[tuple[str, float]]:
    return [(one.worker, one.ago_s) for one in lost.lately(now_s)]


def test_the_last_to_be_lost_comes_first_and_of_many_the_first_are_forgotten() -> None:
    lost = LostWorkers()
    for number in range(MOST_KEPT + 2):
        lost.note(process(number), "broken", float(number))
    assert named(lost, 20.0)[:2] == [("pid 17 @ h:17", 3.0), ("pid 16 @ h:16", 4.0)]
    assert len(named(lost, 20.0)) == MOST_KEPT


def test_one_is_forgotten_after_some_minutes() -> None:
    lost = LostWorkers()
    lost.note(process(1), "broken", 10.0)
    assert named(lost, 10.0 + KEPT_S) == [("pid 1 @ h:1", KEPT_S)]
    assert named(lost, 10.5 + KEPT_S) == []


def test_the_same_process_is_kept_once_and_not_while_it_is_back() -> None:
    lost = LostWorkers()
    for number in (1, 2):
        lost.note(process(number), "broken", 1.0)
    lost.note(process(1), "silent", 5.0)
    assert named(lost, 6.0) == [("pid 1 @ h:1", 1.0), ("pid 2 @ h:2", 5.0)]
    lost.is_back(process(1).key)
    assert named(lost, 6.0) == [("pid 2 @ h:2", 5.0)]


def test_one_whose_stream_broke_is_not_named_beside_its_own_row_while_it_heartbeats() -> None:
    lost = LostWorkers()
    for number in (1, 2):
        lost.note(process(number), "broken", 1.0)
    assert [one.worker for one in lost.lately(2.0, frozenset({process(2).key}))] == ["pid 1 @ h:1"]
