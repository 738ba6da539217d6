"""Requests that are refused for a minute are forgotten after it."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from jdisagg.core.errors import Deadly, HandoffLost, Quarantined
from jdisagg.core.requests import Output
from jdisagg.router.recovery import Quarantine
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop
from tests.unit.wire.rig import request, run_quiet, until


def test_what_may_be_asked_again_is_in_quarantine_no_longer() -> None:
    quarantine = Quarantine(60.0)
    quarantine.add(ask("r1"), 100.0)
    quarantine.add(ask("r2"), 110.0)
    quarantine.add(ask("r1"), 120.0)  # again: from now on
    quarantine.check(ask("r3"), 169.9)
    assert len(quarantine) == 4
    quarantine.check(ask("r2"), 170.0)
    assert len(quarantine) == 2
    with pytest.raises(HandoffLost, match="for 10 s more"):
        quarantine.check(ask("r1"), 170.0)
    with pytest.raises(HandoffLost):
        quarantine.check(ask("r1"), 179.9)
    quarantine.expire(180.0)
    assert len(quarantine) == 0


def test_a_prompt_is_refused_under_its_own_salt_alone() -> None:
    quarantine = Quarantine(60.0)
    quarantine.add(request("r1", prompt=(1, 2, 3), cache_salt="one tenant"), 100.0)
    quarantine.check(request("r2", prompt=(1, 2, 3), cache_salt="another"), 100.0)
    quarantine.check(request("r3", prompt=(1, 2, 3)), 100.0)
    with pytest.raises(HandoffLost, match="quarantined"):
        quarantine.check(request("r4", prompt=(1, 2, 3), cache_salt="one tenant"), 100.0)


def test_who_makes_engines_raise_is_stopped_and_bystanders_go_on() -> None:
    """An engine that raises tells its requests so, and its process ends a moment later. Were that taken for giving them back,
    the cause would go from worker to worker and take down all of them, and who came in that moment would be blamed."""

    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(8)), router=router)
        for worker in workers:
            worker.engine.poison = 666
        bystanders = [(ask(f"r{i}"), list[Output]()) for i in range(8)]
        asked = [asyncio.create_task(collect(router, *each)) for each in bystanders]
        await until(lambda: all(outputs for _, outputs in bystanders))
        poisonous: list[Output] = []
        await collect(router, ask("r666"), poisonous)
        assert isinstance(poisonous[-1].error, Quarantined)
        later = (ask("r70"), list[Output]())
        await collect(router, *later)
        await asyncio.gather(*asked)
        assert sum(worker.engine.is_over for worker in workers) == 2
        for each in (*bystanders, later):
            assert_whole(*each)
        assert router.engine._replays.num_quarantined(monotonic()) == 2, "its id and its prompt"
        await stop(router, *workers)

    run_quiet(body())


def test_who_takes_down_prefill_workers_is_stopped_at_the_second_decode_worker_that_says_so() -> None:
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(4)), router=router)
        for worker in workers:
            worker.engine.refuse = Deadly("p1 to p4 are gone; they may have died of it", num_down=4)
        outputs: list[Output] = []
        await collect(router, ask("r1"), outputs)
        assert isinstance(outputs[-1].error, Quarantined)
        assert "in flight when 8 workers went down (last: p1 to p4 are gone; they" in outputs[-1].error.message
        assert sum(bool(worker.engine.seen) for worker in workers) == 2
        assert router.engine._replays.num_quarantined(monotonic()) == 2, "its id and its prompt"
        for worker in workers:
            worker.engine.refuse = None
        assert_whole(asked := ask("r2"), await collect(router, asked))
        await stop(router, *workers)

    run_quiet(body())


def test_the_state_of_an_idle_router_shows_nothing_in_quarantine_after_its_time() -> None:
    async def body() -> None:
        router = await Router().start()
        replays = router.engine._replays
        replays._quarantine.add(ask("r1"), monotonic())
        assert (await router.engine.debug_state())["quarantined"] == 2
        replays._quarantine.add(ask("r1"), monotonic() - 61.0)
        assert (await router.engine.debug_state())["quarantined"] == 0
        await router.stop()

    run_quiet(body())
