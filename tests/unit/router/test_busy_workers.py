"""Who is less busy: what a worker told of our own requests is not counted again once they have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import Load, Report
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.placement import beginning
from jdisagg.router.prefixes import Near
from jdisagg.router.usable import ANY_REQUEST
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import run_quiet, until

SELDOM = TransferConfig(heartbeat_s=0.25, dead_after_s=5.0)  # many requests end between two of its heartbeats


def place(fleet: Fleet, count: int) -> Counter[str]:
    got: Counter[str] = Counter()
    for _ in range(count):
        entry = fleet.choose("weights", 0.0)
        assert entry is not None
        entry.pending += 1
        got[entry.member.address] += 1
    return got


def test_requests_of_ours_that_have_ended_since_a_worker_told_of_them_do_not_count() -> None:
    workers = idle_fleet("d1", "d2")
    entry = workers.entries()[0]
    entry.pending = 8
    workers.tell_load(entry, Load(running=6, waiting=2, free_pages=10, total_pages=10))
    entry.pending = 0
    assert place(workers, 8) == {"d1": 4, "d2": 4}


def test_those_of_other_routers_count_beside_ours() -> None:
    workers = idle_fleet("d1", "d2")
    entry = workers.entries()[0]
    entry.pending = 2
    workers.tell_load(entry, Load(running=6, free_pages=10, total_pages=10))
    assert place(workers, 6) == {"d2": 6}, "6 of d1 are two of ours and four others"
    assert place(workers, 4) == {"d1": 2, "d2": 2}


def test_the_heartbeats_of_a_worker_whose_stream_stands_are_older_news_than_its_stream() -> None:
    workers = idle_fleet("d1", "d2")
    entry = workers.entries()[0]
    assert workers.heartbeat("d1", "epoch of d1", Report(Load(running=8)), 1.0)
    assert (entry.member.load, entry.others) == (Load(), 0)
    entry.stream = None
    assert workers.heartbeat("d1", "epoch of d1", Report(Load(running=8)), 1.0)
    assert (entry.member.load.running, entry.others) == (8, 8)


def test_a_burst_behind_one_that_a_single_worker_had_is_split_evenly() -> None:
    async def burst(router: Router, number: int) -> None:
        await asyncio.gather(*(collect(router, ask(f"r{8 * number + i}")) for i in range(8)))

    async def body() -> None:
        router = await Router(config=SELDOM).start()
        (d1,) = await fleet(FakeWorker((router.address,), config=SELDOM), router=router)
        d1.engine.frozen = True
        first = asyncio.create_task(burst(router, 0))
        await until(lambda: len(d1.engine.seen) == 8)
        d2 = await FakeWorker((router.address,), config=SELDOM).start()
        await until(lambda: router.linked() == 2)
        d1.engine.frozen = False
        await first
        await burst(router, 1)
        assert (len(d1.engine.seen), len(d2.engine.seen)) == (12, 4)
        await stop(router, d1, d2)

    run_quiet(body())


def test_one_whose_client_is_through_with_it_is_no_other_router_s_until_its_worker_hears_of_that() -> None:
    """A stop string ends a request at the router: the worker's next token is on its way by then."""

    async def body() -> None:
        router = await Router(config=SELDOM).start()
        (d1,) = await fleet(FakeWorker((router.address,), config=SELDOM), router=router)
        (entry,) = router.engine.workers.fleet.entries()
        cancel, late = d1.engine.cancel, asyncio.Event()
        d1.engine.cancel = lambda *given, **named: late.set()  # it has not come to this yet
        outputs = router.engine.generate(ask("r1", max_tokens=1000))
        await anext(outputs)
        request, sink, tokens = d1.engine.live["r1"]
        await outputs.aclose()
        await late.wait()
        seen, before = set[tuple[int, int]](), len(tokens)
        while len(tokens) < before + 10:
            seen.add((entry.member.load.running, entry.others))
            await asyncio.sleep(0.001)
        cancel("r1", request.attempt, sink)
        assert seen == {(1, 0)}
        await stop(router, d1)

    run_quiet(body())


def prefill_fleet() -> Fleet:
    fleet = Fleet(dead_after_s=1.0)
    for number in range(3):
        fleet.register(replace(MEMBER, address=f"p{number}"), 10.0)
    return fleet


def first_asked(fleet: Fleet, kin: bytes = b"") -> Entry:
    return fleet.prefill_peers("f", ANY_REQUEST, Near(), kin)[0]


def test_a_prefill_worker_with_one_long_prompt_is_busier_than_one_with_two_short_ones() -> None:
    p0, p1, p2 = (fleet := prefill_fleet()).entries()
    p0.pending, p0.pending_tokens = 1, 4000
    p1.pending, p1.pending_tokens = 2, 30
    p2.pending, p2.pending_tokens = 1, 31
    assert first_asked(fleet) is p1
    assert [peer.member.address for peer in fleet.prefill_peers("f", ANY_REQUEST, Near())] == ["p1", "p2", "p0"]


def test_prompts_of_other_routers_count_beside_ours_and_ours_once() -> None:
    p0, p1, p2 = (fleet := prefill_fleet()).entries()
    for peer, ours, told in ((p0, 100, 100), (p1, 20, 90), (p2, 50, 100)):
        peer.pending_tokens = ours
        fleet.heartbeat(peer.member.address, "new", Report(Load(pending_prefill_tokens=told)), 10.0)
    for peer in (p0, p1, p2):
        peer.pending_tokens = 0
    assert [(peer.member.address, peer.others_tokens) for peer in fleet.prefill_peers("f", ANY_REQUEST, Near())] == [
        ("p0", 0),
        ("p2", 50),
        ("p1", 70),
    ]


def test_an_idle_prefill_worker_gets_again_what_begins_alike() -> None:
    fleet, other = prefill_fleet(), prefill_fleet()
    other.remove(other.entries()[1])
    kins = [beginning((number, 4, 5)) for number in range(120)]
    homes = [first_asked(fleet, kin).member.address for kin in kins]
    assert homes == [first_asked(fleet, kin).member.address for kin in kins]
    assert min(Counter(homes)[f"p{number}"] for number in range(3)) >= 25
    assert all(first_asked(other, kin).member.address == home for kin, home in zip(kins, homes, strict=True) if home != "p1")
