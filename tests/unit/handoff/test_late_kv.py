"""A P that answers and whose KV does not come: when that is late, who is asked then, and who has the request."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.line import LATE_S, SLOWEST_BYTES_PER_S
from jdisagg.handoff.messages import Accepted, Agreed, Awake, Done, Grant, HandoffId, Quiet, Refused, Started, Want
from tests.unit.handoff.late_rig import LATE, compute, computed, rung
from tests.unit.handoff.rig import CONFIG, FIRST, H2, LEFT, NEVER, H, decode_side, none_of, only, ready, request


def begun() -> DecodeSide:
    """P computes, there are pages, nothing was announced."""
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    for message in (Accepted(cached_tokens=0), Started()):
        side.on_message(H, message, 0.0)
    side.on_reserved("r", 0.0)
    return side


def test_when_no_kv_comes_another_peer_is_asked_and_has_the_request_once_it_has_something() -> None:
    side = computed()
    side.on_arrived(H, "a", 2.1)
    assert side.tick(2.1 + LATE_S) == []
    opened = only(act.OpenStream, side.tick(2.1 + LATE))
    assert (opened.handoff, opened.peer, opened.message.held_tokens) == (H2, "q", 4)
    for message in (Quiet(0.6), Awake()):  # it is not its silence that it is doubted for
        assert side.on_message(H, message, 3.2) == []
    for message in (Accepted(cached_tokens=4), Started()):
        side.on_message(H2, message, 3.2)
    moved = side.on_message(H2, ready("d", 4, 8), 3.3)
    assert rung(moved) == ("other_prefill", "p", True)
    assert only(act.Recovered, moved).cause == "no KV came for 1 s; q was asked meanwhile"
    assert only(act.Hedged, moved).outcome == "moved"
    assert only(act.CloseStream, moved).handoff == H


def test_what_comes_after_all_ends_the_hedge() -> None:
    side = computed()
    side.tick(2.0 + LATE)
    side.on_message(H2, Accepted(cached_tokens=0), 3.2)
    for key in "ab":
        side.on_arrived(H, key, 3.3)
    done = side.on_arrived(H, "c", 3.4)
    assert only(act.Hedged, done).outcome == "returned"
    assert only(act.KVComplete, done).request_id == "r"


def queued(backends: tuple[str, ...] = ("fake",)) -> DecodeSide:
    """As `computed`, credit for two pieces more is used up, none came, and q has put the prompt into its queue."""
    side = decode_side(replace(CONFIG, transfer_buffer_bytes=100))
    side.start(request(22), 0, ("p", "q"), 0.0)
    for message in (Agreed(backends=backends), Accepted(cached_tokens=0), Started()):
        side.on_message(H, message, 0.0)
    side.on_reserved("r", 0.0)
    for key, begin in (("a", 0), ("b", 4)):
        side.on_message(H, ready(key, begin, begin + 4), 1.0)
    side.on_message(H, Done(first=FIRST, num_chunks=6), 2.0)
    assert only(act.OpenStream, side.tick(2.0 + LATE)).handoff == H2
    side.on_message(H2, Accepted(cached_tokens=0), 3.1)
    return side


def test_kv_that_comes_again_while_the_hedge_waits_goes_on_coming_until_it_is_all_there() -> None:
    side = queued()
    assert only(act.Send, side.on_arrived(H, "a", 3.2)[2:]) == act.Send(H, Grant(credit_bytes=200))
    assert only(act.Fetch, side.on_message(H, ready("c", 8, 12), 3.3)).ready.key == "c", "and the hedge keeps its place"
    assert none_of(act.CloseStream, side.on_arrived(H, "b", 3.4))
    side.on_message(H2, Started(), 3.5)  # it computes, which may take longer than what is left
    for key, begin in (("d", 12), ("e", 16)):
        side.on_message(H, ready(key, begin, begin + 4), 3.6)
    side.on_message(H, ready("f", 20, 22), 3.6)
    for key in "cde":
        assert none_of(act.Hedged, side.on_arrived(H, key, 3.7))
    done = side.on_arrived(H, "f", 3.8)
    assert only(act.Hedged, done).outcome == "returned"
    assert only(act.CloseStream, done[:-1]).handoff == H2
    assert only(act.KVComplete, done).request_id == "r"
    assert side.is_idle


def test_a_line_that_crawls_keeps_nobody_from_a_hedge_that_has_something() -> None:
    side = queued()
    side.on_arrived(H, "a", 3.2)
    side.on_message(H, ready("c", 8, 12), 3.3)
    side.on_message(H2, Started(), 3.4)
    moved = side.on_message(H2, ready("x", 0, 4), 3.5)
    assert rung(moved) == ("other_prefill", "p", True)
    assert only(act.CloseStream, moved).handoff == H


@pytest.mark.parametrize("reason", ["stalled", "slow", "timeout"])
def test_what_did_not_come_while_the_hedge_waits_is_asked_for_again(reason: str) -> None:
    side = queued()
    again = only(act.Fetch, side.on_failed(H, "a", reason, 4.0))
    assert (again.handoff, again.ready.key) == (H, "a")
    assert again.deadline_s >= 9.0
    assert side.on_failed(H, "b", "connection", 4.0) == [], "that would fail at once, again and again"


def test_a_port_that_turns_out_to_be_shut_while_the_hedge_waits_is_left_for_another_backend_at_once() -> None:
    """KV is late before a connection that nobody answers has failed."""
    side = computed(backends=("fake", "spare"))
    assert only(act.OpenStream, side.tick(2.0 + LATE)).handoff == H2
    changed = side.on_failed(H, "a", "unreachable", 3.1)
    recovered = only(act.Recovered, changed)
    assert (recovered.rung, recovered.peer, recovered.unreached) == ("other_backend", "p", "fake")
    assert (recovered.stage, recovered.cause) == ("computed", "fetch of [0, 4) over fake: unreachable; going on over spare")
    wants = [action.message for action in changed if isinstance(action, act.Send) and isinstance(action.message, Want)]
    assert [(want.begin, want.end, want.backend) for want in wants] == [(0, 4, "spare"), (4, 8, "spare"), (8, 10, "spare")]
    assert {action.handoff for action in changed if isinstance(action, act.Send | act.CancelFetch)} == {H}
    for key, begin, end in (("a2", 0, 4), ("b2", 4, 8), ("c2", 8, 10)):
        assert only(act.Fetch, side.on_message(H, ready(key, begin, end, "spare"), 3.2)).ready.key == key
        done = side.on_arrived(H, key, 3.3)
    assert only(act.Hedged, done).outcome == "returned"
    assert only(act.KVComplete, done).request_id == "r"
    assert side.is_idle


@pytest.mark.parametrize("reasons", [("connection",), ("stalled", "stalled")])
def test_a_backend_that_brings_nothing_while_the_hedge_waits_is_left_as_it_would_be_without_one(
    reasons: tuple[str, ...],
) -> None:
    side = computed(backends=("fake", "spare"))
    assert only(act.OpenStream, side.tick(2.0 + LATE)).handoff == H2
    for number, reason in enumerate(reasons, 1):
        changed = side.on_failed(H, "a", reason, 3.1)
        assert none_of(act.Fetch, changed) is (number == len(reasons))
    assert only(act.Recovered, changed).cause.endswith(f"over fake: {reasons[-1]}; going on over spare")
    wants = [action.message for action in changed if isinstance(action, act.Send) and isinstance(action.message, Want)]
    assert [(want.begin, want.backend) for want in wants] == [(0, "spare"), (4, "spare"), (8, "spare")]


def test_a_piece_that_was_on_its_way_over_the_backend_that_was_left_is_wanted_over_the_other_one() -> None:
    side = queued(backends=("fake", "spare"))
    changed = side.on_failed(H, "a", "connection", 3.1)
    assert only(act.Recovered, changed).rung == "other_backend"
    side.on_message(H, ready("c", 8, 12), 3.2)  # published before P heard of the change
    for number in range(3):
        late = side.on_failed(H, "c" * (number + 1), "stalled", 3.3)
        wants = [action.message for action in late if isinstance(action, act.Send) and isinstance(action.message, Want)]
        assert wants == ([Want(begin=8, end=12, reason="stalled")] if number < 2 else []), "not for ever"
        assert none_of(act.Fetch, late)
        side.on_message(H, ready("c" * (number + 2), 8, 12), 3.4)


def test_where_there_is_no_other_backend_a_shut_port_leaves_the_request_to_the_hedge() -> None:
    side = computed()
    side.tick(2.0 + LATE)
    assert side.on_failed(H, "a", "unreachable", 3.1) == []


def test_a_piece_that_makes_no_sense_leaves_the_request_to_the_hedge() -> None:
    side = queued()
    moved = side.on_message(H, ready("c", 4, 8), 3.3)
    assert rung(moved)[:2] == ("other_prefill", "p")
    assert "announced before" in only(act.Recovered, moved).cause
    assert side.on_message(H2, Started(), 3.4) == [act.PeerReady("r")]


def test_where_the_hedge_is_quiet_as_well_a_third_is_asked_and_has_its_time() -> None:
    side = computed("p", "q", "s", backends=("fake", "spare"))
    side.tick(2.0 + LATE)
    side.on_message(H2, Quiet(0.6), 3.2)
    assert only(act.OpenStream, side.on_message(H, ready("d", 4, 8), 3.3)).peer == "s"
    side.on_message(HandoffId("r", 3), LEFT, 3.3)
    assert side.tick(13.2) == []
    assert only(act.Hedged, side.tick(13.4)).other == "s"


def test_nobody_waits_for_kv_before_the_first_token_is_there() -> None:
    side = begun()
    side.on_message(H, ready("a", 0, 4), 1.0)
    assert side.tick(5.9) == []
    side.on_message(H, ready("b", 4, 8), 5.9)
    side.on_message(H, Done(first=FIRST, num_chunks=2), 5.9)
    assert only(act.OpenStream, side.tick(5.9)).peer == "q", "the wait began with the first of them"


def test_a_large_piece_has_the_time_that_the_slowest_network_takes_for_it() -> None:
    side = begun()
    side.on_message(H, replace(ready("a", 0, 4), num_bytes=2 * SLOWEST_BYTES_PER_S), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=1), 0.0)
    assert side.tick(LATE_S + 1.9) == []
    assert only(act.OpenStream, side.tick(LATE_S + 2.1)).peer == "q"


def test_pieces_for_others_that_come_from_that_peer_show_that_they_come() -> None:
    side = computed()
    side.start(request(4, request_id="other"), 0, ("p",), 2.0)
    other = HandoffId("other", 2)
    side.on_message(other, Accepted(cached_tokens=0), 2.0)
    side.on_reserved("other", 2.0)
    side.on_message(other, ready("x", 0, 4), 2.0)
    side.on_arrived(other, "x", 2.9)
    assert side.tick(2.9 + LATE_S) == []
    assert only(act.OpenStream, side.tick(2.9 + LATE)).peer == "q"


def test_time_in_which_this_process_stood_still_makes_nothing_late() -> None:
    side = computed()
    for now_s in (2.0, 22.0):
        side.look(now_s)
    assert none_of(act.OpenStream, side.tick(22.0))
    assert only(act.OpenStream, side.tick(22.0 + LATE)).peer == "q"


def test_nor_does_it_take_fetches_from_a_peer_that_was_quiet_for_lost() -> None:
    side = computed()
    assert only(act.OpenStream, side.on_message(H, Quiet(0.6), 2.0)).peer == "q"
    for now_s in (2.0, 22.0):
        side.look(now_s)
    side.on_message(H, Awake(), 22.0)
    assert side.tick(22.0) == []


@pytest.mark.parametrize("steps_s", [(1.0,), (1.5,), (3.0,), (1.2, 0.05), (4.0, 0.1, 0.1)])
def test_long_steps_are_no_standstill(steps_s: tuple[float, ...]) -> None:
    """A large model on few cores: P never answers, and is given up about when it would be with short steps."""
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    side.on_message(H, LEFT, 0.0)
    now_s = 0.0
    for step_s in itertools.cycle(steps_s):
        now_s += step_s
        side.look(now_s)
        if asked := side.tick(now_s):
            break
    assert only(act.Recovered, asked).cause == "no answer for 10 s"
    assert 10.0 <= now_s <= 10.0 + 2 * max(steps_s)


def test_one_that_cannot_help_is_asked_again_after_as_long_a_wait_and_not_at_every_tick() -> None:
    side = computed()
    side.tick(2.0 + LATE)
    back = side.on_message(H2, Refused(error=Overloaded("full")), 3.1)
    assert only(act.Hedged, back).outcome == "refused"
    assert none_of(act.OpenStream, side.tick(3.1 + LATE_S))
    assert only(act.OpenStream, side.tick(3.1 + LATE)).peer == "q"


def test_without_another_peer_the_wait_is_three_times_as_long_and_then_the_rest_is_computed_here() -> None:
    side = computed("p")
    side.on_arrived(H, "a", 2.0)
    assert side.tick(2.0 + 3 * LATE_S) == []
    given_up = side.tick(2.0 + 3 * LATE)
    assert rung(given_up) == ("local_prefill", "p", True)
    assert only(act.Recovered, given_up).cause == "no KV came for 3 s"
    assert only(act.ComputeLocally, given_up).held_tokens == 4
    assert only(act.CloseStream, given_up).handoff == H
    assert side.is_idle


def test_where_nothing_is_computed_here_the_only_peer_has_the_time_of_its_fetches() -> None:
    side = computed("p", config=NEVER)
    assert side.tick(2.0 + 3 * LATE) == []
    taken = side.tick(7.1)  # five seconds, and one of grace
    assert {action.rung for action in taken if isinstance(action, act.Recovered)} == {"refetch"}
    assert none_of(act.NoKV, taken)


def test_when_the_hedge_brings_nothing_either_the_next_one_is_asked_and_then_it_is_computed_here() -> None:
    side = computed("p", "q", "s")
    side.tick(2.0 + LATE)
    for message in (Accepted(cached_tokens=0), Started(), ready("d", 0, 4), ready("e", 4, 8)):
        side.on_message(H2, message, 3.2)
    side.on_message(H2, Done(first=FIRST, num_chunks=3), 3.2)  # it has moved there: p is not doubted any more, but left
    third = side.tick(3.2 + LATE)
    assert only(act.OpenStream, third).peer == "s"
    last = HandoffId("r", 3)
    for message in (Accepted(cached_tokens=0), Started(), ready("f", 0, 4)):
        side.on_message(last, message, 4.3)
    side.on_message(last, Done(first=FIRST, num_chunks=3), 4.3)
    assert rung(side.tick(4.3 + 3 * LATE)) == ("local_prefill", "s", True)


def test_of_several_pieces_the_largest_says_how_long_it_may_take() -> None:
    side = begun()
    side.on_message(H, replace(ready("a", 0, 4), num_bytes=4 * SLOWEST_BYTES_PER_S), 0.0)
    side.on_message(H, ready("b", 4, 8), 0.0)
    side.on_message(H, Done(first=FIRST, num_chunks=2), 0.0)
    assert side.tick(LATE_S + 3.9) == []
    assert only(act.OpenStream, side.tick(LATE_S + 4.1)).peer == "q"


def test_without_pages_nothing_is_late() -> None:
    side = decode_side()
    side.start(request(), 0, ("p", "q"), 0.0)
    for message in (Accepted(cached_tokens=0), Started(), ready("a", 0, 4), Done(first=FIRST, num_chunks=1)):
        side.on_message(H, message, 0.0)
    compute(side, HandoffId("other", 2), ("p",))  # whose pieces do not come either
    assert none_of(act.OpenStream, side.tick(3.9))
