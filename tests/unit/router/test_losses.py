"""Workers that a router lost, by why, on its /metrics: an SRE sees a restart from a network that pauses without the logs."""

from __future__ import annotations

import re

from jdisagg.core.metrics import LOSSES, Metrics
from jdisagg.core.requests import Role
from jdisagg.router.worker_news import LOSS_OF
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import fleet, stop
from tests.unit.router.test_silence import mute_worker
from tests.unit.wire.rig import IMPATIENT, run_quiet, until


def losses(router: Router) -> dict[str, float]:
    """Those that are not 0."""
    found = re.findall(r'jdisagg_workers_lost_total{reason="(\w+)"} (\S+)', router.metrics.text())
    return {reason: float(count) for reason, count in found if float(count)}


def test_why_a_worker_can_be_lost_is_shown_from_the_start() -> None:
    shown = re.findall(r'jdisagg_workers_lost_total{reason="(\w+)"} 0.0', Metrics(engine=False).text())
    assert sorted(shown) == sorted({*LOSS_OF.values(), "broken"}) == sorted(LOSSES)


def test_a_worker_that_dies_is_one_loss_however_often_it_is_tried_again() -> None:
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        await worker.die()
        await until(lambda: not router.engine.workers.fleet.entries())  # it was evicted, too
        assert losses(router) == {"broken": 1}
        await router.stop()

    run_quiet(body())


def test_a_prefill_worker_whose_heartbeats_stop_is_lost() -> None:
    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(lambda: router.engine.workers.members() != [])
        await worker.die()
        await until(lambda: not router.engine.workers.members())
        assert losses(router) == {"evicted": 1}
        await router.stop()

    run_quiet(body())


def test_a_worker_that_falls_silent_is_lost_as_such() -> None:
    async def body() -> None:
        router = await Router().start()
        muted = await mute_worker(router)
        await until(lambda: bool(losses(router)))
        assert set(losses(router)) == {"silent"}
        await stop(router, muted)

    run_quiet(body())
