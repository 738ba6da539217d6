"""Silence is weaker evidence against a request than a death: a host or network that pauses silences several workers at once."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from jdisagg.core.errors import HandoffLost
from jdisagg.core.fleet import Load, Member
from jdisagg.core.requests import Role
from jdisagg.router.fleet import Fleet
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.test_fleet_engine import ask, assert_whole, collect, fleet, stop
from tests.unit.wire.rig import FAST, run_quiet, until

pytestmark = pytest.mark.timeout(120)


async def mute_worker(router: Router) -> FakeWorker:
    """Alone in the fleet, linked, and from now on silent."""
    worker = FakeWorker((router.address,), config=FAST.__class__(heartbeat_s=20.0, dead_after_s=60.0))
    (worker,) = await fleet(worker, router=router)
    worker.engine.frozen = True
    return worker


def test_a_router_that_slept_holds_its_sleep_against_nobody_and_is_not_told_of_the_future() -> None:
    fleet = Fleet(dead_after_s=1.0)
    quiet = Member(
        role=Role.PREFILL, address="quiet:1", worker="p", epoch="e", fingerprint="f", model="m", max_model_len=8, vocab_size=9
    )
    fleet.register(quiet, 10.0)
    fleet.register(replace(quiet, address="heard:1"), 10.0)
    fleet.heartbeat("heard:1", "e", Load(), False, 15.0)  # the first thing the router did when it woke up
    fleet.forgive(5.0, 15.1)
    assert [entry.last_seen_s for entry in fleet.entries()] == [15.0, 15.1]
    assert fleet.evict(16.0) == []
    assert len(fleet.evict(16.2)) == 2


def test_a_router_that_stood_still_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router().start()
        await asyncio.sleep(0.1)
        time.sleep(1.3)
        await until(lambda: "stood still" in caplog.text)
        await router.stop()
        told = re.findall(r"this process stood still for (\d+\.\d) s", caplog.text)
        assert max(float(seconds) for seconds in told) >= 1.2, "the machine may have stood still, too"

    run_quiet(body())


@pytest.mark.parametrize("num_silent", [2, 3])
def test_a_request_outlives_several_silences(num_silent: int) -> None:
    async def body() -> None:
        router = await Router(step_timeout_s=30.0).start()
        asked = ask("r1")
        worker = await mute_worker(router)
        task = asyncio.create_task(collect(router, asked))
        for number in range(num_silent):
            await until(lambda w=worker: w.engine.seen, 20.0)
            await until(lambda: router.linked() == 0, 20.0)  # noticed
            await worker.die()
            if number < num_silent - 1:
                worker = await mute_worker(router)
        heir = await FakeWorker((router.address,)).start()
        assert_whole(asked, await task)
        assert router.engine._replays.num_quarantined == 0
        await stop(router, heir)

    run_quiet(body(), limit_s=90.0)


def test_silence_everywhere_ends_in_quarantine() -> None:
    async def body() -> None:
        router = await Router(step_timeout_s=30.0).start()
        worker = await mute_worker(router)
        task = asyncio.create_task(collect(router, ask("r1")))
        for number in range(4):
            await until(lambda w=worker: w.engine.seen, 20.0)
            await until(lambda: router.linked() == 0, 20.0)
            await worker.die()
            if number < 3:
                assert not task.done()
                worker = await mute_worker(router)
        end = (await task)[-1]
        assert isinstance(end.error, HandoffLost)
        assert "workers went down" in end.error.message
        assert "was lost: no heartbeat for --dead-after-s)" in end.error.message
        with pytest.raises(HandoffLost, match="quarantined for"):
            await collect(router, ask("r1"))
        await stop(router)

    run_quiet(body(), limit_s=90.0)


def test_workers_that_come_back_are_held_against_nobody() -> None:
    async def body() -> None:
        router = await Router(step_timeout_s=30.0).start()
        worker = await mute_worker(router)
        asked = ask("r1")
        task = asyncio.create_task(collect(router, asked))
        for attempt in range(1, 6):  # lost and back five times: two and a half deaths' worth of silence
            await until(lambda n=attempt: len(worker.engine.seen) >= n, 20.0)
        worker.engine.frozen = False
        heir = await FakeWorker((router.address,)).start()
        await worker.die()
        assert_whole(asked, await task)
        assert router.engine._replays.num_quarantined == 0
        await stop(router, heir)

    run_quiet(body(), limit_s=90.0)
