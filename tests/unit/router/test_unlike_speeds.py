"""Prefill workers of unlike speed: each gets what it can do in the same time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from jdisagg.core.fleet import Load, Member, Report
from jdisagg.core.requests import Role
from jdisagg.core.speed import Speed
from jdisagg.router.fleet import Fleet
from jdisagg.router.placement import beginning
from jdisagg.router.prefixes import NOWHERE, Kept, Near
from jdisagg.router.usable import Needs
from tests.unit.router.rig import entry_at
from tests.unit.router.test_busy_workers import prefill_fleet
from tests.unit.router.test_late_registrations import MEMBER

FAST, SLOW, SHORT = Speed(9_500, 10_000), Speed(950, 1_000), Speed(500, 80_000)  # SHORT: of a fast one with short prompts
PROMPT = Needs(prefill_tokens=1000)
TAKEN_SLOW = SLOW.most / FAST.least  # of what the fast ones are taken to compute


def told(fleet: Fleet, *speeds: Speed | None) -> Fleet:
    """Each of its prefill workers has said how fast it is."""
    for entry, speed in zip(fleet.entries(), speeds, strict=False):
        load = Load(pending_prefill_tokens=entry.member.load.pending_prefill_tokens, speed=speed)
        assert fleet.heartbeat(entry.member.address, "new", Report(load), 10.0)
    return fleet


def order(fleet: Fleet, near: Near = NOWHERE, needs: Needs = PROMPT) -> list[str]:
    return [peer.member.address for peer in fleet.prefill_peers("f", needs, near)]


def shares(fleet: Fleet, num: int) -> Counter[str]:
    """Who gets so many prompts that come at once."""
    got: Counter[str] = Counter()
    for number in range(num):
        peer = fleet.prefill_peers("f", PROMPT, NOWHERE, beginning((number, 4, 5)))[0]
        peer.pending, peer.pending_tokens = peer.pending + 1, peer.pending_tokens + PROMPT.prefill_tokens
        got[peer.member.address] += 1
    return got


def test_a_slow_one_gets_of_a_burst_what_its_speed_allows() -> None:
    got = shares(told(prefill_fleet(), FAST, SLOW, FAST), 200)
    assert got["p1"] == pytest.approx(200 * TAKEN_SLOW / (2 + TAKEN_SLOW), abs=2)
    assert abs(got["p0"] - got["p2"]) <= 1


@pytest.mark.parametrize("speeds", [(), (None, None, None), (FAST, SHORT, None), (FAST, FAST, Speed(8_000, 8_100))])
def test_who_is_not_proven_to_be_slower_gets_as_much_as_others(speeds: tuple[Speed | None, ...]) -> None:
    assert sorted(shares(told(prefill_fleet(), *speeds), 90).values()) == [30, 30, 30]
    kins = [beginning((number, 4, 5)) for number in range(60)]
    alike, idle = prefill_fleet(), told(prefill_fleet(), *speeds)
    firsts = [[fleet.prefill_peers("f", PROMPT, NOWHERE, kin)[0].member.address for kin in kins] for fleet in (alike, idle)]
    assert firsts[0] == firsts[1], "what begins alike stays where it is"


def test_what_others_have_there_counts_by_its_speed_too() -> None:
    slow, fast = (fleet := prefill_fleet()).entries()[:2]
    fleet.remove(fleet.entries()[2])
    for entry, speed, pending in ((slow, SLOW, 0), (fast, FAST, 6000)):
        fleet.heartbeat(entry.member.address, "new", Report(Load(pending_prefill_tokens=pending, speed=speed)), 10.0)
    assert order(fleet) == ["p1", "p0"], "6,000 tokens and this prompt are less than nine times this prompt"
    fast.others_tokens = 10_000
    assert order(fleet) == ["p0", "p1"]


def test_a_slow_one_is_asked_for_what_it_has_cached_unless_a_fast_one_computes_that_sooner() -> None:
    fleet = told(prefill_fleet(), FAST, SLOW, FAST)
    slow = fleet.entries()[1]
    assert order(fleet, Near(prefills={slow.key: Kept(950)}))[0] == "p1"
    assert order(fleet, Near(prefills={slow.key: Kept(500)}))[-1] == "p1"


def test_one_that_was_slow_is_asked_again_as_soon_as_it_says_so_or_no_more() -> None:
    fleet = told(prefill_fleet(), FAST, SLOW, FAST)
    assert order(fleet)[-1] == "p1"
    for peer in fleet.entries()[::2]:
        peer.pending, peer.pending_tokens = 1, 1
    assert order(fleet)[-1] == "p1"
    for now in (FAST, None):
        assert order(told(fleet, FAST, now, FAST))[0] == "p1"


def test_a_decode_worker_hears_of_a_slow_one_last() -> None:
    fleet = told(prefill_fleet(), FAST, SLOW, FAST)
    decodes = [replace(MEMBER, address=f"d{number}", epoch="d", role=Role.DECODE) for number in range(20)]
    for decode in decodes:
        fleet.register(decode, 10.0)
    assert {listed(fleet, decode)[-1] for decode in decodes} == {"p1"}
    assert {listed(fleet, decode)[0] for decode in decodes} == {"p0", "p2"}
    told(fleet, FAST, FAST, FAST)
    assert {listed(fleet, decode)[0] for decode in decodes} == {"p0", "p1", "p2"}


def listed(fleet: Fleet, decode: Member) -> tuple[str, ...]:
    entry = entry_at(fleet, decode.address)
    found = fleet.prefill_for(entry)
    assert found is not None
    return found


def test_what_a_prefill_worker_says_of_its_speed_is_there_to_be_looked_at() -> None:
    fleet = told(prefill_fleet(), FAST)
    assert [peer.summary(10.0)["tokens_per_s"] for peer in fleet.entries()] == [[9_500, 10_000], None, None]
