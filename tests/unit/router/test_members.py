"""Processes that come, are heard, and go: each is known by its address and its epoch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.fleet import Load, ProcessFacts, Report
from jdisagg.core.requests import Role
from jdisagg.router import workers
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_draining, count_there
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import IMPATIENT, member, run_quiet, until

LOAD = Load(running=3, waiting=2, pending_prefill_tokens=70)


def test_a_process_that_registers_again_is_heard_and_stays_what_it_was() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, 10.0)
    (entry,) = fleet.entries()
    entry.pending, entry.pending_tokens = 2, 30
    says = {"draining": True, "not_ready": "it loads", "process": ProcessFacts(uptime_s=7)}
    other = replace(member(MEMBER, max_model_len=80, **says), role=Role.PREFILL, text_digest="x")
    assert fleet.register(other, 11.0) is None
    assert fleet.entries() == [entry], "what it has of ours is still counted"
    assert fleet.members() == [member(MEMBER, **says)]
    assert fleet.evict(12.0) == []
    assert fleet.evict(12.1) == [entry]
    assert fleet.members() == []


def test_a_process_that_registers_again_says_how_busy_it_is_unless_its_stream_does() -> None:
    fleet = Fleet(dead_after_s=1.0)
    for address, role in (("p:1", Role.PREFILL), ("d:1", Role.DECODE)):
        fleet.register(replace(MEMBER, address=address, role=role), 10.0)
    p, d = fleet.entries()
    fleet.link(d, 10.0)
    fleet.tell_load(d, LOAD)
    for entry, load in ((p, LOAD), (d, Load())):
        fleet.register(replace(entry.member, load=load), 10.5)
    assert (p.member.load, d.member.load) == (LOAD, LOAD)
    assert [(entry.others, entry.others_tokens) for entry in (p, d)] == [(5, 70)] * 2


def test_a_heartbeat_says_how_busy_the_process_is_and_whether_it_is_about_to_end() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, 10.0)
    (entry,) = fleet.entries()
    entry.pending, entry.pending_tokens = 1, 30
    assert fleet.heartbeat("h:1", "new", Report(LOAD, True), 11.0)
    assert fleet.members() == [replace(MEMBER, load=LOAD, draining=True)]
    assert (entry.others, entry.others_tokens) == (4, 40)
    assert fleet.evict(12.0) == []
    assert fleet.heartbeat("h:1", "new", Report(Load()), 12.0)
    assert fleet.members() == [replace(MEMBER, load=Load())]
    assert (entry.others, entry.others_tokens) == (0, 0), "those of ours it has not heard of yet"


def test_a_heartbeat_of_another_process_is_no_sign_of_life_and_it_is_told_to_register() -> None:
    fleet = Fleet(dead_after_s=1.0)
    assert not fleet.heartbeat("h:1", "new", Report(LOAD), 10.0)
    fleet.register(MEMBER, 10.0)
    assert not fleet.heartbeat("h:1", "old", Report(LOAD, True), 11.0)
    assert not fleet.heartbeat("h:2", "new", Report(LOAD, True), 11.0)
    assert fleet.members() == [MEMBER]
    assert len(fleet.evict(11.1)) == 1


def test_a_process_that_another_one_replaced_is_not_removed_in_its_place() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, 10.0)
    newer = replace(MEMBER, epoch="newer")
    old = fleet.register(newer, 20.0)
    assert old is not None
    fleet.remove(old)
    assert fleet.members() == [newer]
    (entry,) = fleet.entries()
    for _ in range(2):
        fleet.remove(entry)
        assert fleet.members() == []


def test_workers_that_decode_count_while_they_are_connected_and_heard_and_others_while_they_are_there() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, 10.0)
    for number, role in enumerate((Role.DECODE, Role.DECODE, Role.UNIFIED)):
        fleet.register(replace(MEMBER, role=role, address=f"d:{number}", draining=number == 1), 10.0)
    _, d0, d1, d2 = fleet.entries()

    def counts() -> list[int]:
        return [count_there(fleet, role) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)]

    assert counts() == [1, 0, 0]
    for entry in (d0, d1, d2):
        fleet.link(entry, 10.0)
    assert counts() == [1, 2, 1]
    assert [count_draining(fleet, role) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)] == [0, 1, 0]
    assert d2.stream is not None
    d2.stream.is_awaited = True
    d1.stream = None
    assert counts() == [1, 1, 0]
    assert count_draining(fleet, Role.DECODE) == 0


def test_a_router_that_stood_still_does_not_take_that_for_heartbeats_of_a_worker_that_it_does_not_reach() -> None:
    fleet = Fleet(dead_after_s=60.0)
    fleet.register(MEMBER, 10.0)
    (entry,) = fleet.entries()
    entry.reach.misses, entry.reach.missing_since_s = 1, 10.0
    for now_s in (12.0, 14.0):
        fleet.forgive(1.5, now_s)
    assert entry.last_seen_s == entry.reach.missing_since_s == 13.0


def test_a_router_that_slept_no_longer_than_it_meant_to_excuses_nobody() -> None:
    fleet = Fleet(dead_after_s=1.0)
    fleet.register(MEMBER, 10.0)
    for late_s in (0.0, -0.5):
        fleet.forgive(late_s, 11.1)
    assert len(fleet.evict(11.1)) == 1


def test_a_bug_in_one_look_at_the_workers_does_not_end_the_looking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "AFTER_BUG_S", 0.05)

    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        evict, failed = router.engine.workers.fleet.evict, asyncio.Event()

        def fails_once(now_s: float) -> list[Entry]:
            monkeypatch.setattr(router.engine.workers.fleet, "evict", evict)
            failed.set()
            raise KeyError("our bug")

        monkeypatch.setattr(router.engine.workers.fleet, "evict", fails_once)
        await failed.wait()
        await worker.die()
        await until(lambda: not router.engine.workers.members())
        assert "our bug" in caplog.text
        await router.stop()

    run_quiet(body())
