"""What a router makes of each of its workers, in a word that operators read."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from time import monotonic

import pytest

from jdisagg.core.fleet import SUSPECT_S, Member, Standing, State
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.router import fleet_gauges
from jdisagg.router.entry import Entry, RunStream
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_states, count_there
from jdisagg.router.partners import Partners
from jdisagg.router.standings import NO_PARTNER, standing_among
from jdisagg.router.worker_news import WorkerNews
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import entry_at, stop
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import member, run_quiet, until

NOW_S = 10.0


def worker(role: Role = Role.DECODE, *, linked: bool = True, **says: object) -> Entry:
    entry = Entry(replace(MEMBER, role=role, **says), NOW_S)
    if linked and role is not Role.PREFILL:
        entry.stream = RunStream(NOW_S, NOW_S)
    return entry


def standing(entry: Entry, now_s: float) -> Standing:
    """Of one that is alone."""
    return standing_among(entry, Partners([entry.member]), now_s)


@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED, Role.PREFILL])
def test_a_worker_that_nothing_is_the_matter_with_serves(role: Role) -> None:
    entry = worker(role)
    entry.pending = 3
    assert standing(entry, NOW_S) == Standing(State.SERVING, "", 3)


def test_a_worker_that_decodes_is_connecting_until_its_stream_stands_and_unreached_once_that_is_known() -> None:
    entry = worker(linked=False)
    assert standing(entry, NOW_S) == Standing(State.CONNECTING, "", 0)
    entry.reach.why_not = "UNAVAILABLE: refused"
    assert standing(entry, NOW_S) == Standing(State.UNREACHED, "UNAVAILABLE: refused", 0)


def test_a_worker_that_refuses_the_routers_key_is_unreached_at_once_and_its_log_has_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry, why = worker(linked=False), "UNAUTHENTICATED: missing or wrong API key"
    for _ in range(3):
        WorkerNews(Metrics(engine=False).fleet.lost).not_linked(entry, why)
    assert standing(entry, NOW_S) == Standing(State.UNREACHED, why, 0)
    assert caplog.text.count("refuses this router") == 1


def test_a_worker_whose_stream_says_nothing_is_silent_whatever_it_said_last() -> None:
    entry = worker(not_ready="no prefill worker is reached")
    assert entry.stream is not None
    entry.stream.quiet_s = NOW_S
    assert standing(entry, NOW_S).state is State.SILENT


def test_a_worker_that_says_it_is_not_ready_is_not_and_says_why() -> None:
    assert standing(worker(not_ready="no prefill worker"), NOW_S) == Standing(State.NOT_READY, "no prefill worker", 0)


def test_a_worker_that_failed_is_suspect_for_a_while() -> None:
    entry = worker()
    entry.suspect_until_s = NOW_S + SUSPECT_S
    assert standing(entry, NOW_S).state is State.SUSPECT
    assert standing(entry, NOW_S + SUSPECT_S).state is State.SERVING


@pytest.mark.parametrize("linked", [True, False])
def test_a_worker_that_is_about_to_end_is_draining_whatever_else_is_the_matter(linked: bool) -> None:
    entry = worker(linked=linked, draining=True, not_ready="no prefill worker")
    entry.reach.why_not = "UNAVAILABLE"
    assert standing(entry, NOW_S) == Standing(State.DRAINING, "", 0)


@pytest.mark.parametrize("partner", ["none", "of other weights", "draining", "there"])
def test_a_decode_worker_that_never_computes_prompts_is_ready_where_a_prefill_worker_pairs_with_it(partner: str) -> None:
    fleet = Fleet(dead_after_s=1.0)
    needy = replace(MEMBER, role=Role.DECODE, needs_prefill=True)
    needy = member(needy, fingerprint_parts=(("numerics", "exact"),))
    peer = member(MEMBER, role=Role.PREFILL, address="p:1", draining=partner == "draining")
    fleet.register(needy, NOW_S)
    if partner == "of other weights":
        fleet.register(member(peer, fingerprint="others", fingerprint_parts=(("numerics", "fast"),)), NOW_S)
    elif partner != "none":
        fleet.register(peer, NOW_S)
    entry = fleet.entries()[0]
    fleet.link(entry, NOW_S)
    is_ready = partner == "there"
    state, why = (State.SERVING, "") if is_ready else (State.NOT_READY, NO_PARTNER)
    if partner == "of other weights":
        why += ": numerics (prefill fast, decode exact) must be the same on both"
    found = dict(fleet.standings(NOW_S))[needy]
    assert (found.state, found.why, found.requests) == (state, why, 0)
    assert count_there(fleet, Role.DECODE) == is_ready
    assert count_states(fleet, NOW_S)[Role.DECODE, State.NOT_READY] == (not is_ready)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_with_other_weights_than_all_on_the_other_side_is_unpaired_and_what_differs_is_told(role: Role) -> None:
    fleet = Fleet(dead_after_s=1.0)
    odd = made(role, "odd:1", "bb")
    members = [made(Role.PREFILL, "p:1", "aa"), made(Role.DECODE, "d:1", "aa"), odd]
    for one in members:
        fleet.register(one, NOW_S)
    for entry in fleet.entries():
        fleet.link(entry, NOW_S)
    found = {one.address: standing for one, standing in fleet.standings(NOW_S)}
    for address in ("p:1", "d:1"):
        assert (found[address].state, found[address].why, found[address].requests) == (State.SERVING, "", 0)
    prefill, decode = ("bb", "aa") if role is Role.PREFILL else ("aa", "bb")
    assert found["odd:1"].state is State.UNPAIRED
    assert found["odd:1"].why.endswith(f": weights.layers (prefill {prefill}, decode {decode}) must be the same on both")
    assert count_states(fleet, NOW_S)[role, State.UNPAIRED] == count_states(fleet, NOW_S)[role, State.SERVING] == 1
    entry = entry_at(fleet, "odd:1")
    if role is Role.DECODE:
        assert count_there(fleet, role) == 2, "a word for operators: it serves"
        assert fleet.choose("bb", NOW_S) is entry


def made(role: Role, address: str, weights: str) -> Member:
    parts = (("weights.layers", weights),)
    return member(MEMBER, role=role, address=address, fingerprint=weights, fingerprint_parts=parts)


@pytest.mark.parametrize("others", [(), (Role.UNIFIED,), (Role.PREFILL,)])
def test_a_prefill_worker_is_not_unpaired_where_there_is_no_decode_worker_at_all(others: tuple[Role, ...]) -> None:
    """It is then the decode workers that are missing."""
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(made(Role.PREFILL, "p:1", "aa"), NOW_S)
    for role in others:
        fleet.register(made(role, "o:1", "bb"), NOW_S)
    assert count_states(fleet, NOW_S)[Role.PREFILL, State.SERVING] == 1 + (others == (Role.PREFILL,))


def test_a_scrape_finds_each_worker_in_one_state_whenever_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        router = await Router().start()
        fleet, now_s = router.engine.workers.fleet, monotonic()
        worker = FakeWorker((router.address,))
        await worker.start()
        await until(lambda: router.linked() == 1)
        (entry,) = fleet.entries()
        for num_looks in range(len(Role) * len(State)):
            entry.suspect_until_s = now_s + num_looks + 0.5
            monkeypatch.setattr(fleet_gauges, "monotonic", count(now_s).__next__)
            shown = re.findall(r"jdisagg_worker_states\{.*\} (\S+)", router.metrics.text())
            monkeypatch.undo()
            assert (len(shown), sum(map(float, shown))) == (len(Role) * len(State), 1)
        await stop(router, worker)

    run_quiet(body())
