"""Prefill workers that are full or drain are waited for: as long as they say, without pages, and without being called lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jdisagg.core.errors import HandoffLost, InvalidRequest, Overloaded, Unavailable
from jdisagg.core.requests import Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.full_peers import LEAST_S, LONGEST_S, SPREAD, wait_s
from jdisagg.handoff.messages import Accepted, Done, HandoffId, Quiet, Refused, Started, StreamEnded
from tests.unit.handoff.rig import DEAD, H2, NEVER, H, decode_side, none_of, only, request, stages


def test_a_pause_for_another_worker_that_was_full_is_no_reconnection_to_the_one_that_was_lost() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 1.0)
    lost = only(act.Recovered, side.on_message(H2, DEAD, 1.0))
    assert (lost.rung, lost.peer) == ("other_prefill", "q")
    assert only(act.OpenStream, side.tick(2.5)).peer == "p"


def refused_again_and_again(retry_after_s: float, times: int, request_id: str = "r", deadline_s: float = 1000.0) -> list[float]:
    """For how long the one prefill worker was left alone each time."""
    side = decode_side()
    side.start(request(deadline_s=deadline_s, request_id=request_id), 0, ("p",), 0.0)
    now_s, pauses = 0.0, []
    for serial in range(1, times + 1):
        full = Refused(error=Overloaded("full", retry_after_s=retry_after_s))
        assert none_of(act.OpenStream, side.on_message(HandoffId(request_id, serial), full, now_s))
        began_s = now_s
        while none_of(act.OpenStream, side.tick(now_s)):
            now_s += 1 / 64
            assert now_s < began_s + 100.0
        pauses.append(now_s - began_s)
    return pauses


def test_a_full_worker_is_asked_again_with_growing_pauses_where_it_names_short_ones() -> None:
    for pause_s, least_s in zip(refused_again_and_again(0.1, 7), (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0), strict=True):
        assert least_s <= pause_s <= least_s * (1 + SPREAD) + 1 / 32


@pytest.mark.parametrize(("retry_after_s", "least_s"), [(3.0, 3.0), (7.5, 7.5), (30.0, LONGEST_S)])
def test_a_full_worker_is_not_asked_before_the_time_that_it_named_nor_much_later(retry_after_s: float, least_s: float) -> None:
    for pause_s in refused_again_and_again(retry_after_s, 3):
        assert least_s <= pause_s <= least_s * (1 + SPREAD) + 1 / 32


def test_those_that_were_refused_together_do_not_come_back_together() -> None:
    pauses = sorted(refused_again_and_again(30.0, 1, f"r{number}")[0] for number in range(64))
    gaps = [later - sooner for sooner, later in itertools.pairwise(pauses)]
    assert pauses[-1] - pauses[0] > 0.8 * LONGEST_S * SPREAD
    assert max(gaps) < 0.1 * LONGEST_S


def test_a_full_worker_is_asked_more_often_where_little_time_is_left_but_not_without_end() -> None:
    side, now_s, waits = decode_side(), 0.0, []
    side.start(request(deadline_s=16.0), 0, ("p",), 0.0)
    for serial in itertools.count(1):
        side.on_message(HandoffId("r", serial), Refused(error=Overloaded("full", retry_after_s=30.0)), now_s)
        began_s = now_s
        while not (actions := side.tick(now_s)):
            now_s += 1 / 64
        if not none_of(act.Fail, actions):
            break
        waits.append((16.0 - began_s, now_s - began_s))
    assert len(waits) == 2
    for left_s, pause_s in waits:
        least_s = max(left_s / 2, LEAST_S)
        assert least_s <= pause_s <= least_s * (1 + SPREAD) + 1 / 32


@pytest.mark.parametrize(("told_s", "left_s"), [(1.0, 1.2), (1.5, 2.0), (1.8, 2.0), (1.9, 2.5), (7.0, 8.0)])
def test_who_is_promised_a_place_before_its_deadline_comes_for_it(told_s: float, left_s: float) -> None:
    pauses = [wait_s(HandoffId(f"r{number}", 1), told_s, left_s) for number in range(64)]
    assert max(pauses) < left_s
    assert min(pauses) >= min(told_s, left_s / 2)


def test_each_full_worker_has_the_time_that_it_named() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full", retry_after_s=8.0)), 0.0)
    side.on_message(H2, Refused(error=Overloaded("full", retry_after_s=1.0)), 0.0)
    assert only(act.OpenStream, side.tick(1.5)).peer == "q"
    assert none_of(
        act.OpenStream, side.on_message(HandoffId("r", 3), Refused(error=Overloaded("full", retry_after_s=30.0)), 1.5)
    )
    assert none_of(act.OpenStream, side.tick(7.9))
    assert only(act.OpenStream, side.tick(12.0)).peer == "p"


def waiting_for_full(*request_ids: str) -> DecodeSide:
    """One that p has taken, and behind it those that it refused, in this order."""
    side = decode_side()
    side.start(request(request_id="taken"), 0, ("p",), 0.0)
    side.on_message(HandoffId("taken", 1), Accepted(cached_tokens=0), 0.0)
    for serial, request_id in enumerate(request_ids, 2):
        side.start(request(request_id=request_id), 0, ("p",), 0.0)
        side.on_message(HandoffId(request_id, serial), Refused(error=Overloaded("full", retry_after_s=30.0)), 0.0)
    return side


def opens(actions: Sequence[act.DecodeAction]) -> list[str]:
    return [action.handoff.request_id for action in actions if isinstance(action, act.OpenStream)]


def test_when_a_full_worker_begins_with_a_prompt_the_one_that_has_waited_longest_is_offered_at_once() -> None:
    side = waiting_for_full("z", "a", "b")
    started = side.on_message(HandoffId("taken", 1), Started(), 0.1)
    assert opens(started) == ["z"]
    assert act.PeerReady("taken") in started
    again = Refused(error=Overloaded("full", retry_after_s=30.0))
    assert side.on_message(HandoffId("z", 5), again, 0.1) == [
        act.CancelFetch(HandoffId("z", 5)),
        act.CloseStream(HandoffId("z", 5)),
    ]
    assert opens(side.on_message(HandoffId("taken", 1), Started(), 0.2)) == ["z"], "it keeps its turn"
    side.on_message(HandoffId("z", 6), Accepted(cached_tokens=0), 0.2)
    assert opens(side.on_message(HandoffId("z", 6), Started(), 0.3)) == ["a"]
    assert opens(side.on_message(HandoffId("z", 6), Started(), 0.3)) == ["b"]
    assert opens(side.on_message(HandoffId("z", 6), Started(), 0.3)) == []


def test_a_place_is_offered_to_nobody_whose_hand_off_is_over_or_who_waits_for_another_worker() -> None:
    side = waiting_for_full("gone", "late", "b")
    side.start(request(request_id="q"), 0, ("q",), 0.0)
    side.on_message(HandoffId("q", 5), Refused(error=Overloaded("full", retry_after_s=30.0)), 0.0)
    side.release("gone")
    assert opens(side.on_message(HandoffId("taken", 1), Started(), 0.1)) == ["late"]
    side.release("late")
    assert opens(side.on_message(HandoffId("taken", 1), Started(), 0.2)) == ["b"]
    assert opens(side.on_message(HandoffId("taken", 1), Started(), 0.3)) == []
    assert opens(side.tick(13.0)) == ["q"]
    side.on_message(HandoffId("q", 8), Refused(error=Overloaded("full", retry_after_s=30.0)), 13.0)
    full = side._live.full
    assert full._waiting.keys() == full._at.keys() == {"q"}
    side.tick(100.0)
    assert side.is_idle, "the deadline of all is over"
    assert not any((full._waiting, full._at, full._turns))


DRAINING = Refused(error=Unavailable("draining"))


def test_a_draining_worker_is_waited_for_when_nobody_else_may_compute_the_prompt() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    assert only(act.OpenStream, side.on_message(H, DRAINING, 0.0)).peer == "q"
    actions = side.on_message(H2, DRAINING, 0.0)
    assert actions == [act.CancelFetch(H2), act.CloseStream(H2)], "neither a failure nor a rung"
    assert stages(side) == ["waiting"]
    assert side.tick(0.09) == []
    third = HandoffId("r", 3)
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert side.on_message(third, DRAINING, 0.1)[-1:] != []
    side.on_message(HandoffId("r", 4), Accepted(cached_tokens=0), 0.2)
    assert stages(side) == ["accepted"], "another one in its place"


def test_a_draining_worker_that_ended_with_none_in_its_place_is_asked_once_more_and_given_up() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, DRAINING, 0.0)
    gone = StreamEnded(reason="unreachable", error=Unavailable("prefill peer p: Hello: UNAVAILABLE"))
    assert only(act.OpenStream, side.tick(0.1)).handoff == H2
    assert only(act.Recovered, side.on_message(H2, gone, 0.1)).rung == "reconnect"
    assert only(act.OpenStream, side.tick(0.5)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(HandoffId("r", 3), gone, 0.5)).error, HandoffLost)


def test_a_draining_worker_is_left_at_once_when_the_prompt_may_be_computed_here() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    other = side.on_message(H, DRAINING, 0.0)
    assert only(act.OpenStream, other).peer == "q"
    assert only(act.Recovered, other).cause == "refused: draining"
    assert only(act.ComputeLocally, side.on_message(H2, DRAINING, 0.0)).request_id == "r"


@pytest.mark.parametrize("full", [Refused(error=Overloaded("it stops")), DEAD])
@pytest.mark.parametrize("had_begun", [True, False])
def test_no_pages_are_reserved_in_a_pause_for_one_that_had_begun(full: Refused | StreamEnded, had_begun: bool) -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p",), 0.0)
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    if had_begun:
        assert side.on_message(H, Started(), 0.0) == [act.PeerReady("r")]
    paused = side.on_message(H, full, 0.0)
    assert [a for a in paused if isinstance(a, act.PeerReady)] == [act.PeerReady("r", is_ready=False)] * had_begun
    assert stages(side) == ["waiting"]


def test_one_for_which_the_request_is_wrong_is_not_asked_again_while_the_other_is_full() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("short", "q"), 0.0)
    side.on_message(H, Refused(error=InvalidRequest("short")), 0.0)
    side.on_message(H2, Refused(error=Overloaded("full")), 0.0)
    assert only(act.OpenStream, side.tick(1.5)).peer == "q"


def test_a_full_worker_is_waited_for_when_the_other_one_is_lost() -> None:
    side = decode_side(NEVER)
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full")), 0.0)
    assert none_of(act.Fail, side.on_message(H2, DEAD, 0.0))
    assert only(act.OpenStream, side.tick(1.5)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(HandoffId("r", 3), DEAD, 1.6)).error, HandoffLost)


def test_all_whose_pause_is_over_at_once_go_on_at_once() -> None:
    side = decode_side()
    for serial, request_id in enumerate("rs", 1):
        side.start(request(request_id=request_id), 0, ("p",), 0.0)
        side.on_message(HandoffId(request_id, serial), Refused(error=Overloaded("full")), 0.0)
    assert sorted(opens(side.tick(1.5))) == ["r", "s"]


@pytest.mark.parametrize("trouble", [DEAD, Quiet(seconds=0.7)])
def test_a_full_worker_whose_time_is_over_is_asked_at_once_when_the_other_one_is_lost_or_quiet(
    trouble: StreamEnded | Quiet,
) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full", retry_after_s=2.0)), 0.0)
    side.on_message(H2, Accepted(cached_tokens=0), 0.0)
    assert only(act.OpenStream, side.on_message(H2, trouble, 4.0)).peer == "p"


def test_a_full_worker_whose_time_is_over_is_asked_at_once_when_one_is_lost_that_was_asked_for_a_quiet_one() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q", "s"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full", retry_after_s=2.0)), 0.0)
    side.on_message(H2, Accepted(cached_tokens=0), 0.0)
    assert only(act.OpenStream, side.on_message(H2, Quiet(seconds=0.7), 1.0)).peer == "s", "it has had no time yet"
    assert only(act.OpenStream, side.on_message(HandoffId("r", 3), DEAD, 4.0)).peer == "p"


@pytest.mark.parametrize("trouble", [DEAD, Quiet(seconds=0.7)])
def test_who_is_in_the_middle_of_an_answer_waits_for_no_place(trouble: StreamEnded | Quiet) -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, Refused(error=Overloaded("full", retry_after_s=8.0)), 0.0)
    for message in (Accepted(cached_tokens=0), Started(), Done(first=Output(request_id="r", token_ids=(42,)), num_chunks=3)):
        side.on_message(H2, message, 0.0)
    assert only(act.OpenStream, side.on_message(H2, trouble, 1.0)).peer == "p"


@pytest.mark.parametrize("peers", [("p",), ("p", "q", "s")])
def test_a_full_worker_shares_out_who_comes_again_among_those_that_compute_prompts(peers: tuple[str, ...]) -> None:
    side = decode_side()
    opening = only(act.OpenStream, side.start(replace(request(), num_asked=16), 0, peers, 0.0)).message
    assert opening.request.num_asked == len(peers), "16 decode workers may ask the same one"
