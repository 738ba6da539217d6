"""How long a fetch may take where many pieces share the network: of one decode worker, or of its prefill worker and others."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.messages import Accepted, Done, HandoffId
from tests.unit.handoff.rig import FIRST, LEFT, NEVER, decode_side, only, ready, request

PIECE_BYTES = 32 * 2**20


def fetches(side: DecodeSide, peers: list[str], now_s: float = 0.0) -> list[float]:
    """The time that a piece of each gets, all of them announced now."""
    times_s = []
    for number, peer in enumerate(peers, start=1):
        name, handoff = f"r{number}", HandoffId(f"r{number}", number)
        side.start(request(4, request_id=name, deadline_s=1e6), 0, (peer,), now_s)
        side.on_message(handoff, Accepted(cached_tokens=0), now_s)
        side.on_reserved(name, now_s)
        times_s.append(fetched(side.on_message(handoff, replace(ready(name, 0, 4), num_bytes=PIECE_BYTES), now_s)) - now_s)
    return times_s


def fetched(actions: list[act.DecodeAction]) -> float:
    """The deadline of the fetch."""
    return only(act.Fetch, actions).deadline_s


def test_a_fetch_has_the_time_of_pieces_from_all_peers_for_they_share_this_workers_network() -> None:
    """Twenty peers at 1 Gbit/s together: 6 MiB a second each, and the worker that fetches is at fault, not they."""
    times_s = fetches(decode_side(NEVER), [f"p{number}" for number in range(20)])
    assert times_s[0] == 5.0
    assert times_s[-1] == 20.0  # at 32 MiB a second


def test_after_a_time_that_was_too_short_the_next_ones_from_that_peer_are_twice_as_long_until_its_pieces_have_come() -> None:
    side = decode_side(NEVER)
    assert fetches(side, ["p", "p", "q"]) == [5.0, 8.0, 5.0]
    one, two, other = (HandoffId(f"r{number}", number) for number in (1, 2, 3))
    assert fetched(side.on_failed(one, "r1", "slow", 5.0)) == 5.0 + 16.0
    assert fetched(side.on_failed(two, "r2", "slow", 8.0)) == 8.0 + 16.0  # begun when the first was: the same lack of time
    side.on_arrived(one, "r1", 20.0)
    side.on_failed(two, "r2", "timeout", 24.0)
    again = side.on_message(two, replace(ready("r2-again", 0, 4), num_bytes=PIECE_BYTES), 24.0)
    assert fetched(again) == 24.0 + 20.0
    assert fetched(side.on_failed(other, "r3", "connection", 24.0)) == 24.0 + 5.0  # of another peer
    side.on_arrived(two, "r2-again", 40.0)
    side.start(request(4, request_id="s", deadline_s=1e6), 0, ("p",), 40.0)
    late = HandoffId("s", 4)
    side.on_message(late, Accepted(cached_tokens=0), 40.0)
    side.on_reserved("s", 40.0)
    assert fetched(side.on_message(late, replace(ready("s", 0, 4), num_bytes=PIECE_BYTES), 40.0)) == 45.0


def test_time_in_which_this_process_stood_still_blames_no_peer() -> None:
    side = decode_side(NEVER)
    side.start(request(4, request_id="asked", deadline_s=1e6), 0, ("p",), 0.0)
    side.start(request(4, request_id="computed", deadline_s=1e6), 0, ("p",), 0.0)
    side.on_message(HandoffId("asked", 1), LEFT, 0.0)
    computed = HandoffId("computed", 2)
    side.on_message(computed, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("computed", 0.0)
    side.on_message(computed, Done(first=FIRST, num_chunks=1), 1.0)
    for now_s in (1.0, 58.0):
        side.look(now_s)
    assert side.tick(58.0) == []
    assert side.tick(66.9) == []
    assert {note.request_id for note in side.tick(67.1) if isinstance(note, act.Recovered)} == {"asked"}, "ten seconds of ours"
    assert {note.request_id for note in side.tick(68.1) if isinstance(note, act.Recovered)} == {"computed"}, "a lease of ours"


def test_no_fetch_is_taken_for_lost_before_what_it_brought_while_this_process_stood_still_is_heard() -> None:
    side = decode_side(NEVER)
    assert fetches(side, ["p"]) == [5.0]
    for now_s in (1.0, 21.0):
        side.look(now_s)
    assert side.tick(21.0) == []
    assert side.tick(25.9) == []
    assert only(act.Recovered, side.tick(26.0)).cause.endswith(": timeout"), "six seconds of ours"


def test_a_fetch_that_began_behind_the_standstill_has_no_more_time_for_it() -> None:
    side, handoff = decode_side(NEVER), HandoffId("r", 1)
    side.start(request(4, deadline_s=1e6), 0, ("p",), 0.0)
    side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.look(1.0)
    assert fetched(side.on_message(handoff, ready("r", 0, 4), 21.0)) == 26.0  # heard in the first tick behind it
    side.look(21.0)
    assert side.tick(26.9) == []
    assert only(act.Recovered, side.tick(27.0)).cause.endswith(": timeout")


def test_a_fetch_has_no_more_time_than_its_request_however_long_this_process_stood_still() -> None:
    side, handoff = decode_side(NEVER), HandoffId("r", 1)
    side.start(request(4, deadline_s=24.0), 0, ("p",), 0.0)
    side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
    side.on_reserved("r", 0.0)
    side.on_message(handoff, ready("r", 0, 4), 0.0)
    for now_s in (1.0, 21.0):
        side.look(now_s)
    side.on_failed(handoff, "r", "slow", 22.0)
    later = HandoffId("s", 2)
    side.start(request(4, request_id="s", deadline_s=1e6), 0, ("p",), 22.0)
    side.on_message(later, Accepted(cached_tokens=0), 22.0)
    side.on_reserved("s", 22.0)
    assert fetched(side.on_message(later, ready("s", 0, 4), 22.0)) == 27.0, "it was the request that had too little"


def test_a_connection_that_stalls_before_its_time_is_over_changes_no_times() -> None:
    side = decode_side(NEVER)
    fetches(side, ["p"])
    assert fetched(side.on_failed(HandoffId("r1", 1), "r1", "stalled", 1.0)) == 1.0 + 5.0


def test_a_request_whose_own_time_is_over_says_nothing_about_its_peers() -> None:
    """Its piece may have had a tenth of a second: a lost piece of the next request is to be noticed as soon as ever."""
    side = decode_side(NEVER)
    for number, name in enumerate(("short", "other"), start=1):
        handoff = HandoffId(name, number)
        side.start(request(4, request_id=name, deadline_s=0.1 if name == "short" else 1e6), 0, ("p",), 0.0)
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
        side.on_reserved(name, 0.0)
    short, other = HandoffId("short", 1), HandoffId("other", 2)
    assert fetched(side.on_message(short, ready("short", 0, 4), 0.0)) == 0.1
    side.on_failed(short, "short", "timeout", 0.1)
    assert fetched(side.on_message(other, ready("other", 0, 4), 0.1)) == 0.1 + 5.0
