"""Who waits for a place at a P is offered to it in the order in which they were first refused, whoever leaves meanwhile."""

from __future__ import annotations

import pytest

from jdisagg.handoff.full_peers import FullPeers
from jdisagg.handoff.inbound import Inbound
from jdisagg.handoff.ladder import FULL, Ladder
from tests.unit.handoff.rig import request


def refused(request_id: str) -> Inbound:
    """By both."""
    ladder = Ladder(("p", "q"))
    for peer in ladder.peers:
        ladder.busy(peer, FULL)
    return Inbound(request(request_id=request_id), 0, ladder)


def drained(full: FullPeers, peer: str) -> str:
    """Whose turn it is at `peer`, one after the other."""
    names = ""
    while (record := full.take_first(peer)) is not None:
        names += record.request.request_id
        assert len(set(names)) == len(names), f"twice: {names}"
    return names


@pytest.mark.parametrize("peer", ["p", "q"])
@pytest.mark.parametrize("gone", "abcd")
def test_who_leaves_is_no_longer_offered_and_the_others_keep_their_turn(gone: str, peer: str) -> None:
    full, records = FullPeers(), [refused(name) for name in "abcd"]
    for record in records:
        full.add(record)
    full.drop(gone)
    assert drained(full, peer) == "abcd".replace(gone, "")
    assert drained(full, "p") + drained(full, "q") == "", "taken at one, they wait at none"


@pytest.mark.parametrize("again", "abcd")
def test_who_was_offered_and_refused_once_more_has_its_old_turn(again: str) -> None:
    full, records = FullPeers(), {name: refused(name) for name in "abcd"}
    for record in records.values():
        full.add(record)
    full.drop(again)
    full.add(records[again])
    assert drained(full, "p") == "abcd"


def test_whose_hand_off_is_over_has_no_turn_left_for_the_next_one_of_its_name() -> None:
    full, records = FullPeers(), {name: refused(name) for name in "ab"}
    for record in records.values():
        full.add(record)
    full.forget("a")
    full.add(records["a"])
    assert drained(full, "q") == "ba"
