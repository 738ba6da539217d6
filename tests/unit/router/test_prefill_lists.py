"""What routers tell decode workers of prefill workers, and what they make of those that serve nothing without."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.fleet import Load, Report
from jdisagg.core.requests import Role
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_there
from jdisagg.router.prefixes import Near
from jdisagg.router.recovery import ReplayConfig
from jdisagg.router.usable import ANY_REQUEST
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import run_quiet, until


def test_a_decode_worker_hears_of_the_prefill_workers_that_pair_with_it() -> None:
    async def body() -> None:
        router = await Router().start()
        p1 = FakeWorker((router.address,), Role.PREFILL)
        other = FakeWorker((router.address,), Role.PREFILL, fingerprint="weights-2")
        decode, unified = FakeWorker((router.address,)), FakeWorker((router.address,), Role.UNIFIED)
        await fleet(decode, unified, p1, other, router=router)
        await until(lambda: decode.prefill == {router.address: (p1.address,)})
        assert unified.prefill == {}, "it needs none"
        p1.draining = True
        await until(lambda: decode.prefill == {router.address: ()})
        for worker in (decode, unified, p1, other):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_decode_worker_that_needs_prefill_workers_is_no_reason_to_be_ready_until_there_is_one_for_it() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.2)).start()
        decode = FakeWorker((router.address,), needs_prefill=True, fingerprint_parts=(("numerics", "fast"),))
        await fleet(decode, router=router)
        health = router.engine.health()
        assert not health.serves
        lonely = f"no prefill worker that pairs with fake @ {decode.address} (--local-prefill never)"
        assert health.reason == lonely
        with pytest.raises(Unavailable, match=r"no prefill worker that pairs with fake @ .*; waited 0 s: start one"):
            await collect(router, ask("r1"))
        parts = (("numerics", "exact"),)
        other = FakeWorker((router.address,), Role.PREFILL, fingerprint="weights-2", fingerprint_parts=parts)
        await other.start()
        await until(lambda: count_there(router.engine.workers.fleet, Role.PREFILL))
        assert router.engine.health().reason == f"{lonely}; numerics (prefill exact, decode fast) must be the same on both"
        with pytest.raises(Unavailable, match=r"numerics \(prefill exact, decode fast\) must be the same on both; waited 0 s"):
            await collect(router, ask("r1"))
        assert router.replays() == 0, "nothing was tried in vain"
        p1 = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(lambda: router.engine.health().serves)
        assert_whole(asked := ask("r2"), await collect(router, asked))
        for worker in (decode, other, p1):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_fleet_whose_decode_workers_all_drain_says_so() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.1)).start()
        decode = FakeWorker((router.address,))
        await fleet(decode, router=router)
        task = asyncio.create_task(collect(router, asked := ask("r1", max_tokens=60)))
        await until(lambda: decode.engine.live)
        decode.draining = True
        await until(lambda: not router.engine.health().serves)
        said = f"every decode or unified worker is draining (fake @ {decode.address})"
        assert router.engine.health().reason == said
        with pytest.raises(Unavailable, match="is draining"):
            await collect(router, ask("r2"))
        assert_whole(asked, await task)
        await decode.die()
        await until(lambda: router.engine.health().reason == "no decode or unified worker is connected")
        await router.stop()

    run_quiet(body())


def test_of_two_prefill_workers_the_one_with_fewer_tokens_to_compute_is_asked_first_whoever_sent_it_the_others() -> None:
    fleet = Fleet(dead_after_s=1.0)
    for number, pending in enumerate((500, 20)):
        fleet.register(replace(MEMBER, address=f"h:{number}"), 10.0)
        fleet.heartbeat(f"h:{number}", "new", Report(Load(pending_prefill_tokens=pending)), 10.0 + number)
    assert [peer.member.address for peer in fleet.prefill_peers("f", ANY_REQUEST, Near())] == ["h:1", "h:0"]
