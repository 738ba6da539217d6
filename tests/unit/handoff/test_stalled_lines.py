"""Fetches that stall: a line that brought nothing twice is given up, and remembered until something comes over it."""

from __future__ import annotations

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Accepted, HandoffId, Started
from tests.unit.handoff.late_rig import LATE, compute, computed, rung
from tests.unit.handoff.rig import CONFIG, DEAD, H2, NEVER, H, decode_side, none_of, only, ready, request


def test_the_only_peer_is_given_up_after_two_stalls_whichever_pieces_they_are_of() -> None:
    side = computed("p")
    assert side.tick(2.0 + LATE) == []
    assert rung(side.on_failed(H, "a", "stalled", 3.0)) == ("refetch", "p", False)
    last = side.on_failed(H, "b", "stalled", 4.0)
    assert rung(last) == ("local_prefill", "p", True)
    assert only(act.ComputeLocally, last).held_tokens == 0
    next_one = HandoffId("next", 2)
    compute(side, next_one, ("p",))
    assert rung(side.on_failed(next_one, "a", "stalled", 6.0)) == ("local_prefill", "p", True), "nothing came since"
    compute(side, healed := HandoffId("healed", 3), ("p",))
    side.on_arrived(healed, "b", 7.0)
    assert rung(side.on_failed(healed, "a", "stalled", 8.0))[0] == "refetch"


def test_where_nothing_is_computed_here_it_is_asked_once_more() -> None:
    side = computed("p", config=NEVER)
    side.on_failed(H, "a", "stalled", 3.0)
    assert rung(side.on_failed(H, "b", "stalled", 4.0)) == ("reconnect", "p", True)


@pytest.mark.parametrize("config", [NEVER, CONFIG])
def test_a_request_that_ends_because_no_kv_came_says_so_of_its_last_peer(config: TransferConfig) -> None:
    side = computed("p", config=config)
    assert rung(side.on_message(H, DEAD, 3.0)) == ("reconnect", "p", False)
    side.tick(4.0)
    for message in (Accepted(cached_tokens=0), Started(), ready("d", 0, 4), ready("e", 4, 8)):
        side.on_message(H2, message, 4.0)
    side.on_failed(H2, "d", "stalled", 5.0)
    last = side.on_failed(H2, "e", "stalled", 6.0)
    assert only(act.NoKV, last) == act.NoKV("p", "fetch of [4, 8) over fake: stalled")
    assert only(act.Fail if config is NEVER else act.ComputeLocally, last).request_id == "r"


def test_another_backend_is_tried_after_two_stalls_and_is_not_blamed_for_them() -> None:
    side = computed("p", backends=("tcp", "grpc"))
    side.on_failed(H, "a", "stalled", 3.0)
    last = side.on_failed(H, "b", "stalled", 4.0)
    assert rung(last) == ("other_backend", "p", False)
    assert only(act.Recovered, last).unreached == "", "whoever stands still is reached all the same"
    side.on_message(H, ready("d", 0, 4, backend="grpc"), 4.0)
    assert rung(side.on_failed(H, "d", "stalled", 5.0))[0] == "refetch"


@pytest.mark.parametrize("reason", ["connection", "timeout", "checksum"])
def test_a_piece_that_came_between_or_another_failure_makes_no_second_stall(reason: str) -> None:
    side = computed("p")
    side.on_failed(H, "a", "stalled", 3.0)
    side.on_arrived(H, "b", 3.5)
    assert rung(side.on_failed(H, "c", "stalled", 4.0))[0] == "refetch"
    assert rung(side.on_failed(H, "a", reason, 4.5))[0] == "refetch"


def test_with_another_peer_two_stalls_move_the_request_there_and_the_line_is_remembered() -> None:
    side = computed()
    side.on_failed(H, "a", "stalled", 2.1)
    assert rung(side.on_failed(H, "b", "stalled", 2.2)) == ("other_prefill", "p", True)
    compute(side, following := HandoffId("following", 3), ("p",))
    assert rung(side.on_failed(following, "a", "connection", 3.0))[0] == "refetch", "that is no stall"
    assert rung(side.on_failed(following, "b", "stalled", 3.0))[0] == "local_prefill"


def test_what_stalled_while_another_peer_was_asked_is_remembered_too() -> None:
    side = computed()
    side.tick(2.0 + LATE)
    assert only(act.Fetch, side.on_failed(H, "a", "stalled", 3.1)).ready.key == "a"
    for message in (Accepted(cached_tokens=0), Started(), ready("d", 0, 4)):
        side.on_message(H2, message, 3.2)
    compute(side, following := HandoffId("following", 3), ("p",))
    assert rung(side.on_failed(following, "b", "stalled", 4.0))[0] == "local_prefill", "the second one in a row"
    compute(side, healed := HandoffId("healed", 4), ("p",))
    side.on_arrived(healed, "a", 5.0)
    side.release("healed")
    compute(side, HandoffId("last", 5), ("s",))
    assert not side._recovery._bad_lines, "nothing is bad any more"


@pytest.mark.parametrize(("reason", "no_kv"), [("slow", True), ("timeout", True), ("stalled", True), ("checksum", False)])
def test_what_ran_out_of_time_says_that_no_kv_came(reason: str, no_kv: bool) -> None:
    side = computed("p")
    taken = side.on_failed(H, "a", reason, 3.0)
    for _ in range(2):
        if not none_of(act.Send, taken):  # the range under a new key
            side.on_message(H, ready("again", 0, 4), 4.0)
        key = "a" if none_of(act.Send, taken) else "again"
        taken = side.on_failed(H, key, reason, 5.0)
        if rung(taken)[0] != "refetch":
            break
    assert rung(taken) == ("local_prefill" if no_kv else "reconnect", "p", no_kv)


def test_a_stall_counts_though_the_request_had_no_more_time_than_the_fetch() -> None:
    side = decode_side()
    side.start(request(deadline_s=2.0), 0, ("p",), 0.0)
    for message in (Accepted(cached_tokens=0), Started()):
        side.on_message(H, message, 0.0)
    side.on_reserved("r", 0.0)
    for key, begin, end in (("a", 0, 4), ("b", 4, 8)):
        side.on_message(H, ready(key, begin, end), 0.0)
    side.on_failed(H, "a", "stalled", 1.0)
    assert rung(side.on_failed(H, "b", "stalled", 1.5))[0] == "local_prefill"
