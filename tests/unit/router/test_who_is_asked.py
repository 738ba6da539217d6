"""Who gets the next request of several workers: what speaks against one, in the order of its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.fleet import MAX_PREFILL_PEERS, SUSPECT_S, Load, Report
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.prefixes import NOWHERE, Near
from jdisagg.router.usable import Needs, Wishes
from tests.unit.router.rig import entry_at
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.wire.rig import member

NOW_S = 100.0


def tried(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    asked["but_not"] = frozenset({entry.member.address})


def quiet(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    fleet.tell_quiet(entry, True, NOW_S)


def suspect(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    fleet.suspect(entry, NOW_S)


def short(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    entry.member = member(entry.member, max_model_len=499)
    asked["num_tokens"] = 500


def unlike(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    """It computes other bits than the stream has."""
    entry.member, asked["bits"] = replace(entry.member, bits="48-bb"), "48-aa"


def away(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    asked["home"] = "d2" if entry.member.address == "d1" else "d1"


def lonely(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    entry.member = member(entry.member, fingerprint="lonely")
    fleet.register(member(entry.member, role=Role.PREFILL, address="p1", epoch="p1", fingerprint="weights"), NOW_S)


def busy(fleet: Fleet, entry: Entry, asked: dict[str, Any]) -> None:
    entry.pending = 20


FLAWS = [tried, quiet, suspect, short, away, lonely, busy, unlike]  # the worst first
Flaw = Callable[[Fleet, Entry, dict[str, Any]], None]
PAIRS = [(worse, better) for i, worse in enumerate(FLAWS) for better in FLAWS[i + 1 :]]


@pytest.mark.parametrize("flawed", ["d1", "d2"])
@pytest.mark.parametrize("flaw", FLAWS)
def test_each_flaw_alone_speaks_for_the_other_worker(flaw: Flaw, flawed: str) -> None:
    fleet, asked = idle_fleet("d1", "d2"), dict[str, Any]()
    (entry,) = (entry for entry in fleet.entries() if entry.member.address == flawed)
    flaw(fleet, entry, asked)
    chosen = fleet.choose(None, NOW_S, wishes=Wishes(**asked))
    assert chosen is not None
    assert chosen.member.address != flawed


@pytest.mark.parametrize(("worse", "better"), PAIRS)
def test_the_worse_flaw_decides_whatever_else_speaks_against_the_other(worse: Flaw, better: Flaw) -> None:
    fleet, asked = idle_fleet("d1", "d2"), dict[str, Any]()
    d1, d2 = fleet.entries()
    worse(fleet, d1, asked)
    better(fleet, d2, asked)
    assert fleet.choose(None, NOW_S, wishes=Wishes(**asked)) is d2


def test_a_decode_worker_that_reaches_no_prefill_worker_is_asked_after_those_that_do_however_idle() -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    fleet.register(member(d1.member, role=Role.PREFILL, address="p1", epoch="p1", fingerprint="weights"), NOW_S)

    def says(entry: Entry, *, alone: bool) -> None:
        assert fleet.heartbeat(entry.member.address, entry.member.epoch, Report(Load(), alone=alone), NOW_S)

    says(d1, alone=True)
    d2.pending = 20
    assert fleet.choose(None, NOW_S) is d2
    assert fleet.choose(None, NOW_S, wishes=Wishes(but_not=frozenset({"d2"}))) is d1
    says(d2, alone=True)
    assert fleet.choose(None, NOW_S) is d1, "of those that are all alone the least busy one, as ever"
    says(d1, alone=False)
    d1.pending = 50
    assert fleet.choose(None, NOW_S) is d1, "it reaches one again"
    fleet.register(member(d2.member, epoch="later", alone=True), NOW_S + 9.0)
    assert not d2.member.draining
    assert [entry.member.alone for entry in fleet.entries() if entry.member.decodes] == [False, True]


def test_a_worker_that_failed_somebody_is_asked_again_by_others_after_a_while() -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    fleet.suspect(d1, NOW_S)
    d2.pending = 1
    assert fleet.choose(None, NOW_S + SUSPECT_S - 0.1) is d2
    assert fleet.choose(None, NOW_S + SUSPECT_S) is d1
    fleet.remove(d2)
    fleet.suspect(d1, NOW_S)
    assert fleet.choose(None, NOW_S) is d1, "a suspect is better than nobody"


@pytest.mark.parametrize("why", ["drains", "is not linked", "is awaited", "is too short", "has other weights", "prefills"])
def test_who_cannot_take_a_request_is_never_asked_however_idle(why: str) -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    d2.pending = 50
    if why == "is not linked":
        d1.stream = None
    elif why == "is awaited":
        assert d1.stream is not None
        d1.stream.is_awaited = True
    else:
        changes = {
            "drains": {"draining": True},
            "is too short": {"max_model_len": 9},
            "has other weights": {"fingerprint": "other"},
            "prefills": {"role": Role.PREFILL},
        }
        d1.member = member(d1.member, **changes[why])
    ten = Needs(num_tokens=10)
    assert fleet.choose("weights", NOW_S, ten) is d2
    assert fleet.usable("weights", ten) == ([d2], "", False)
    fleet.remove(d2)
    assert fleet.choose("weights", NOW_S, ten) is None
    found = fleet.usable("weights", ten)
    assert found.entries == []
    assert found.lacks != ""


def test_a_worker_that_just_holds_the_whole_request_is_not_too_short_for_it() -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    d1.member, d2.pending = member(d1.member, max_model_len=500), 1
    assert fleet.choose(None, NOW_S, Needs(num_tokens=500), Wishes(num_tokens=500)) is d1
    assert fleet.choose(None, NOW_S, Needs(num_tokens=500), Wishes(num_tokens=501)) is d2
    assert fleet.choose(None, NOW_S, Needs(num_tokens=501)) is d2


def test_of_equally_many_requests_the_worker_with_the_emptier_pool_is_asked() -> None:
    fleet = idle_fleet("d1", "d2", "d3")
    for entry, free_pages in zip(fleet.entries(), (3, 8, 5), strict=True):
        fleet.tell_load(entry, Load(free_pages=free_pages, total_pages=10))
    assert fleet.choose(None, NOW_S) is fleet.entries()[1]
    fleet.entries()[1].pending = 1
    assert fleet.choose(None, NOW_S) is fleet.entries()[2], "a whole request is more than any pool"


def test_a_prompt_goes_where_it_was_though_other_routers_keep_everybody_busy() -> None:
    fleet = idle_fleet("d1", "d2")
    for entry in fleet.entries():
        fleet.tell_load(entry, Load(running=20))
    for entry in fleet.entries():
        entry.pending = 1
        near = Near(decodes={entry.key: 512})
        assert fleet.choose(None, NOW_S, wishes=Wishes(near=near)) is entry, "21 are not much more than 20"
        entry.pending = 0


def test_a_decode_worker_is_told_of_so_many_prefill_workers_that_hold_the_prompt_and_take_requests() -> None:
    fleet = idle_fleet("d1")
    d1 = fleet.entries()[0].member
    for number in range(MAX_PREFILL_PEERS + 3):
        peer = replace(d1, role=Role.PREFILL, address=f"p{number}", worker=f"p{number}", epoch=f"p{number}")
        changes = [{"draining": True}, {"max_model_len": 9}, {"fingerprint": "other"}]
        fleet.register(member(peer, **(changes[number] if number < 3 else {})), NOW_S)

    def named(num_tokens: int, weights: str = "weights") -> list[str]:
        peers = fleet.prefill_peers(weights, Needs(prefill_tokens=num_tokens), NOWHERE)
        return [peer.member.address for peer in peers]

    assert set(named(10)) == {f"p{number}" for number in range(3, MAX_PREFILL_PEERS + 3)}
    assert len(named(9)) == len(named(d1.card.max_model_len)) == MAX_PREFILL_PEERS
    assert named(d1.card.max_model_len + 1) == named(10, "lonely") == []
    named_worker = fleet.prefill_named("p4")
    assert named_worker is not None
    assert named_worker.member.address == "p4"
    assert fleet.prefill_named("decode @ d1") is None, "it does not prefill"
    assert fleet.prefill_for(named_worker) is None
    decode = entry_at(fleet, "d1")
    assert len(fleet.prefill_for(decode) or ()) == MAX_PREFILL_PEERS + 1, "all that do not drain"
