"""A prefill worker that comes while a request waits, or after it was begun, is asked for it like for any later one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Deadly, HandoffLost, InvalidRequest, Overloaded, Unavailable
from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.handoff import actions as act
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.ladder import Ladder
from jdisagg.handoff.messages import Accepted, Done, HandoffId, Lives, PrefillToDecode, Quiet, Refused, StreamEnded
from tests.unit.handoff.late_rig import LATE
from tests.unit.handoff.rig import CONFIG, DEAD, FIRST, H2, LEFT, NEVER, H, decode_side, none_of, only, ready, request, stages
from tests.unit.handoff.test_both_sides import PEER_LISTS, HandoffMachine

FULL = Refused(error=Overloaded("4096 requests are waiting"))
SHORT = Refused(error=InvalidRequest("too long"))
DRAINING = Refused(error=Unavailable("draining"))


def begun(*peers: str, config: TransferConfig = NEVER) -> tuple[DecodeSide, list[str]]:
    """The hand-off of a request, and the prefill workers as they are known: a test adds to them."""
    side, known = decode_side(config), list(peers)
    side.start(request(), 0, peers, 0.0, lambda: tuple(known))
    return side, known


def stream(serial: int) -> HandoffId:
    return HandoffId("r", serial)


def test_who_comes_while_a_request_waits_is_asked_after_the_pause_before_those_that_were_full() -> None:
    side, known = begun("p")
    side.on_message(H, FULL, 0.0)
    known.append("q")
    assert only(act.OpenStream, side.tick(0.1)).peer == "q"
    assert none_of(act.OpenStream, side.on_message(H2, FULL, 0.1)), "p has said when to come"
    assert none_of(act.OpenStream, side.tick(0.9))
    known.append("s")
    assert only(act.OpenStream, side.tick(1.6)).peer == "s"
    assert only(act.OpenStream, side.on_message(stream(3), FULL, 1.6)).peer == "p", "its time has come"


def test_those_that_were_full_are_waited_for_where_all_newcomers_serve_less() -> None:
    side, known = begun(*(full := [f"p{number}" for number in range(MAX_PREFILL_PEERS)]))
    for serial in range(1, MAX_PREFILL_PEERS + 1):
        side.on_message(stream(serial), Refused(error=Overloaded("full", retry_after_s=5.0)), 0.0)
    known[:0] = [f"short{number}" for number in range(MAX_PREFILL_PEERS)]
    assert only(act.OpenStream, side.tick(0.1)).peer == "short0"
    for serial in range(MAX_PREFILL_PEERS + 1, 2 * MAX_PREFILL_PEERS + 1):
        assert none_of(act.Fail, side.on_message(stream(serial), SHORT, 0.1))
    asked = [
        only(act.OpenStream, actions).peer for now in range(1, 10) if not none_of(act.OpenStream, actions := side.tick(now))
    ]
    assert asked
    assert asked[0] in full


@pytest.mark.parametrize("message", [FULL, DRAINING])
def test_who_has_come_meanwhile_is_asked_without_a_pause(message: Refused) -> None:
    side, known = begun("p")
    known.insert(0, "q")
    assert only(act.OpenStream, side.on_message(H, message, 0.0)).peer == "q"


@pytest.mark.parametrize("config", [NEVER, CONFIG])
def test_who_has_come_meanwhile_goes_on_where_all_others_were_lost(config: TransferConfig) -> None:
    side, known = begun("p", config=config)
    known[:] = ["q"]
    moved = side.on_message(H, DEAD, 0.0)
    assert (only(act.OpenStream, moved).peer, only(act.Recovered, moved).rung) == ("q", "other_prefill")


def test_who_has_come_meanwhile_is_asked_where_no_kv_comes_and_has_its_time() -> None:
    side, known = begun("p", config=CONFIG)
    for message in (Accepted(cached_tokens=0), ready("a", 0, 4), Done(first=FIRST, num_chunks=3)):
        side.on_message(H, message, 1.0)
    side.on_reserved("r", 1.0)
    known.append("q")
    moved = side.tick(1.0 + 3 * LATE)
    assert (only(act.OpenStream, moved).peer, only(act.Recovered, moved).rung) == ("q", "other_prefill")
    side.on_message(H2, LEFT, 1.0 + 3 * LATE)
    assert side.tick(13.9) == []
    assert only(act.Recovered, side.tick(14.1)).cause == "no answer for 10 s"


def test_who_comes_in_the_pause_of_the_only_one_that_was_lost_is_asked_instead() -> None:
    side, known = begun("p")
    assert only(act.Recovered, side.on_message(H, DEAD, 0.0)).rung == "reconnect"
    known.append("q")
    assert only(act.OpenStream, side.tick(0.1)).peer == "q"
    side.on_message(H2, Accepted(cached_tokens=0), 0.1)
    assert stages(side) == ["accepted"]


def test_what_became_of_a_peer_is_not_forgotten_when_others_come() -> None:
    side, known = begun("lost", "short", "full")
    side.on_message(H, DEAD, 0.0)
    side.on_message(H2, SHORT, 0.0)
    assert none_of(act.OpenStream, side.on_message(stream(3), FULL, 0.0))
    known.append("new")
    assert only(act.OpenStream, side.tick(0.1)).peer == "new"
    assert none_of(act.OpenStream, side.on_message(stream(4), FULL, 0.1))
    assert only(act.OpenStream, side.tick(1.6)).peer == "full"
    assert only(act.OpenStream, side.on_message(stream(5), FULL, 1.6)).peer == "new"
    assert none_of(act.OpenStream, side.on_message(stream(6), FULL, 1.6))


def test_one_that_comes_and_does_not_fit_is_no_reason_not_to_ask_the_only_other_one_once_more() -> None:
    side, known = begun("p")
    known.append("short")
    assert only(act.OpenStream, side.on_message(H, DEAD, 0.0)).peer == "short"
    assert none_of(act.Fail, side.on_message(H2, SHORT, 0.0))
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    assert isinstance(only(act.Fail, side.on_message(stream(3), DEAD, 0.1)).error, HandoffLost)


def test_a_request_that_ends_whoever_computes_it_does_not_go_through_the_whole_fleet() -> None:
    side, known = begun("p0")
    for number in range(1, MAX_PREFILL_PEERS):
        known[:] = [f"p{number}"]  # each that has died is known no more
        assert only(act.OpenStream, side.on_message(stream(number), DEAD, 0.0)).peer == f"p{number}"
    known[:] = ["another"]
    assert not none_of(act.Fail, side.on_message(stream(MAX_PREFILL_PEERS), DEAD, 0.0))


DIED = StreamEnded(reason="dead", is_death=True)
SILENT = StreamEnded(reason="heartbeat", is_death=True)
DOWN = (DIED, SILENT)
UNREADABLE = StreamEnded(reason="unreadable", error=HandoffLost("a message of prefill peer p cannot be read"))
UNREACHED = (StreamEnded(reason="unreachable"), StreamEnded(reason="dead", error=Unavailable("no connection")))


def lost(*ends: PrefillToDecode, config: TransferConfig = NEVER) -> Sequence[act.DecodeAction]:
    """What follows where each of so many was reached, has taken the prompt, and then said that."""
    side, _ = begun(*(f"p{number}" for number in range(len(ends))), config=config)
    actions: Sequence[act.DecodeAction] = []
    for number, end in enumerate(ends, 1):
        assert none_of(act.Fail, actions)
        if end not in UNREACHED:
            side.on_message(stream(number), Accepted(cached_tokens=0), 0.0)
        actions = side.on_message(stream(number), end, 0.0)
    return actions


def test_with_as_many_as_one_asks_going_down_the_request_is_said_to_be_what_they_may_have_died_of() -> None:
    error = only(act.Fail, lost(*DOWN, *DOWN)).error
    assert isinstance(error, Deadly)
    assert error.num_down == MAX_PREFILL_PEERS
    assert error.message == (
        "request r: hand-off lost at stage accepted with p3: heartbeat; p0, p1, p2 tried before; they may have died of it; "
        "--local-prefill never forbids computing it here"
    )
    assert only(act.ComputeLocally, lost(*DOWN, *DOWN, config=CONFIG)), "where D may, it does"


@pytest.mark.parametrize("num_peers", [2, 3])
def test_with_all_that_there_are_going_down_it_is_said_so_too_unless_they_may_just_stand_still(num_peers: int) -> None:
    error = only(act.Fail, lost(*num_peers * [DIED])).error
    assert isinstance(error, Deadly)
    assert error.num_down == num_peers
    for other in (SILENT, *UNREACHED, UNREADABLE, StreamEnded(reason="closed")):
        assert type(only(act.Fail, lost(other, *(num_peers - 1) * [DIED])).error) is HandoffLost


@pytest.mark.parametrize(
    ("end", "kind", "what"), [(DIED, Deadly, "the worker may have died of it"), (SILENT, HandoffLost, "never")]
)
def test_the_only_one_that_went_down_is_asked_once_more_and_then_the_request_may_be_what_it_died_of(
    end: StreamEnded, kind: type[HandoffLost], what: str
) -> None:
    side, _ = begun("p")
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    assert none_of(act.Fail, side.on_message(H, end, 0.0))
    assert only(act.OpenStream, side.tick(0.1)).peer == "p"
    error = only(act.Fail, side.on_message(H2, UNREACHED[0], 0.1)).error
    assert type(error) is kind
    assert what in error.message


def test_one_whose_connection_was_cut_and_that_answers_as_the_process_it_was_has_not_gone_down() -> None:
    side, _ = begun("p")
    side.on_message(H, Accepted(cached_tokens=0), 0.0)
    side.on_message(H, DIED, 0.0)
    assert side.on_message(H, Lives("p"), 0.05) == []
    assert only(act.OpenStream, side.tick(0.1)).peer == "p", "no sooner and no later"
    side.on_message(H2, Accepted(cached_tokens=0), 0.1)
    assert type(only(act.Fail, side.on_message(H2, StreamEnded(reason="closed"), 0.2)).error) is HandoffLost
    assert side.on_message(H, Lives("p"), 0.3) == []
    side, _ = begun("p0", "p1")
    for number in (0, 1):
        side.on_message(stream(number + 1), Accepted(cached_tokens=0), 0.0)
        actions = side.on_message(stream(number + 1), DIED, 0.0)
        side.on_message(stream(1), Lives("p0"), 0.0)
    assert type(only(act.Fail, actions).error) is HandoffLost


@pytest.mark.parametrize("other", [*UNREACHED, UNREADABLE, StreamEnded(reason="closed"), Accepted(cached_tokens=0)])
def test_those_that_were_not_reached_or_live_speak_against_no_request(other: PrefillToDecode) -> None:
    for ends in ((*DOWN, DIED, other), (other, *DOWN, DIED)):
        error = only(act.Fail, lost(*ends)).error
        assert type(error) is HandoffLost
        assert "died" not in error.message


def test_one_that_was_quiet_and_one_that_was_asked_meanwhile_go_down_with_it_like_any_other() -> None:
    side, _ = begun("p0", "p1", "p2", "p3")
    for handoff in (H, H2):  # p1 is asked as p0 is quiet, goes down, and then p2 is; p0 goes down, and p2
        side.on_message(handoff, Accepted(cached_tokens=0), 0.0)
        side.on_message(handoff, Quiet(0.6) if handoff == H else DIED, 0.0)
    side.on_message(stream(3), Accepted(cached_tokens=0), 0.0)
    for number in (1, 3):
        assert none_of(act.Fail, side.on_message(stream(number), DIED, 0.0))
    side.on_message(stream(4), Accepted(cached_tokens=0), 0.0)
    assert isinstance(only(act.Fail, side.on_message(stream(4), DIED, 0.0)).error, Deadly)


def test_too_late_says_who_was_full() -> None:
    text = "request r: deadline passed in the hand-off at stage"
    side, known = begun("p", "q", "s")
    side.on_message(H, FULL, 99.9)
    side.on_message(H2, DRAINING, 99.9)
    assert only(act.Fail, side.tick(100.0)).error.message == f"{text} opening with s; p was full, q was draining"
    side, known = begun("p")
    side.on_message(H, FULL, 99.95)
    assert only(act.Fail, side.tick(100.0)).error.message == f"{text} waiting without a prefill worker; p was full"
    side, known = begun("p")
    side.on_message(H, FULL, 99.0)
    known.append("q")
    side.tick(99.5)
    side.on_message(H2, Accepted(cached_tokens=0), 99.6)
    assert only(act.Fail, side.tick(100.0)).error.message == f"{text} accepted with q", "it is that one's queue"


class NewcomersMachine(HandoffMachine):
    """The same where prefill workers come and go."""

    @rule(peers=st.sampled_from(PEER_LISTS))
    def know(self, peers: tuple[str, ...]) -> None:
        self.world.known = peers


TestNewcomers = NewcomersMachine.TestCase


def test_of_a_full_fleet_no_more_are_asked_between_two_pauses_than_a_router_names() -> None:
    known = [f"p{number}" for number in range(20)]
    ladder = Ladder(tuple(known[:MAX_PREFILL_PEERS]), lambda: tuple(known))

    def ask(peer: str | None) -> list[str]:
        asked = []
        while peer is not None:
            asked.append(peer)
            ladder.busy(peer, "full")
            peer = ladder.next_or_new_peer()
        return asked

    rounds = [ask(ladder.next_peer())]
    for _ in range(6):
        known.append(known.pop(0))  # their order by load changes meanwhile
        rounds.append(ask(ladder.resume(0.0)))
    assert {len(asked) for asked in rounds} == {MAX_PREFILL_PEERS}
    assert len(ladder.peers) == MAX_PREFILL_PEERS
    assert {*rounds[0], *rounds[1], *rounds[2]} > {*rounds[0]}, "others have a turn"


def test_while_all_of_a_full_fleet_have_their_time_one_more_is_asked_after_each_pause() -> None:
    known = tuple(f"p{number}" for number in range(3 * MAX_PREFILL_PEERS))
    ladder, asked = Ladder(known[:MAX_PREFILL_PEERS], lambda: known), []
    for peer in known[:MAX_PREFILL_PEERS]:
        ladder.busy(peer, "full", 8.0)
    for now_s in (2.0, 4.0, 6.0):
        peer = ladder.resume(now_s)
        assert peer is not None
        asked.append(peer)
        ladder.busy(peer, "full", now_s + 8.0)
        assert ladder.next_beside_full() is None
    assert asked == list(known[MAX_PREFILL_PEERS : MAX_PREFILL_PEERS + 3])
    side, others = begun(*known[:MAX_PREFILL_PEERS])
    for serial in range(1, MAX_PREFILL_PEERS + 1):
        side.on_message(stream(serial), FULL, 0.0)
    others += known[MAX_PREFILL_PEERS:]
    assert only(act.OpenStream, side.tick(0.1)).peer == known[MAX_PREFILL_PEERS]
    assert none_of(act.OpenStream, side.on_message(stream(MAX_PREFILL_PEERS + 1), FULL, 0.1))


def test_newcomers_take_the_places_of_those_that_are_full() -> None:
    new = tuple(f"n{number}" for number in range(MAX_PREFILL_PEERS))
    ladder = Ladder(("full",), lambda: ("full", *new))
    ladder.busy("full", "full", 1.0)
    assert ladder.resume(0.9) == new[0]
    assert ladder.peers == new


def test_who_is_asked_next_does_not_depend_on_who_came_while_somebody_is_left_to_ask() -> None:
    ladder = Ladder(("b", "a"), lambda: ("new", "a", "b"))
    assert ladder.next_or_new_peer() == "b"


@pytest.mark.parametrize(("num_unfit", "asked"), [(2 * MAX_PREFILL_PEERS - 1, "new"), (2 * MAX_PREFILL_PEERS, None)])
def test_nobody_new_is_asked_for_a_request_that_none_of_many_could_serve(num_unfit: int, asked: str | None) -> None:
    peers = tuple(f"p{number}" for number in range(num_unfit))
    ladder = Ladder(peers, lambda: ("new",))
    for peer in peers:
        ladder.failed(peer, InvalidRequest("too long", field="prompt"))
    assert ladder.resume(0.0) == asked


def test_one_that_comes_and_is_lost_leaves_the_only_one_there_was_its_second_try() -> None:
    side, known = begun("p")
    known.append("q")
    assert only(act.OpenStream, side.on_message(H, DIED, 0.0)).peer == "q"
    assert none_of(act.OpenStream, side.on_message(H2, DIED, 0.0))
    assert only(act.OpenStream, side.tick(0.2)).peer == "p"
