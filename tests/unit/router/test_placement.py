"""Which worker a request runs on: one that serves its weights, is there, and has least to do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic

import pytest

from jdisagg.core.errors import DeadlineExceeded, Unavailable
from jdisagg.core.requests import Output, Role
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.wire.rig import FAST, run_quiet, until


def test_a_request_runs_on_one_worker_with_an_ordered_list_of_prefill_peers():
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        p1, p2, d = FakeWorker(where, Role.PREFILL), FakeWorker(where, Role.PREFILL), FakeWorker(where)
        other = FakeWorker(where, Role.PREFILL, fingerprint="weights-2")
        await fleet(p1, p2, other, d, router=router)
        await until(lambda: len(router.engine.workers.members()) == 4)
        asked = ask("r1")
        assert_whole(asked, outputs := await collect(router, asked))
        assert set(d.engine.seen[0].prefill_peers) == {p1.address, p2.address}
        provenance = outputs[-1].provenance
        assert provenance is not None
        assert provenance.recoveries == ("refetch",)
        assert router.engine.card.vocab_size == 1000
        assert router.engine.health().serves
        workers = [f'jdisagg_workers{{role="{role}"}} {count}.0' for role, count in (("prefill", 3), ("decode", 1))]
        assert set(workers) <= set(router.metrics.text().splitlines())
        await stop(router, p1, p2, other, d)

    run_quiet(body())


def test_choices_of_one_request_go_to_one_worker_and_others_to_the_less_busy():
    async def body() -> None:
        router = await Router().start()
        workers = [FakeWorker((router.address,)) for _ in range(3)]
        await fleet(*workers, router=router)
        await until(lambda: len(router.engine.workers.members()) == 3)
        choices = [replace(ask(f"r{i}"), fork_group="r") for i in range(6)]
        alone = [ask(f"s{i}") for i in range(4)]
        await asyncio.gather(*(collect(router, asked) for asked in (*choices, *alone)))
        seen = [{request.request_id[0] for request in worker.engine.seen} for worker in workers]
        assert sum("r" in letters for letters in seen) == 1
        assert sum("s" in letters for letters in seen) >= 2
        assert not router.engine._placement._homes
        await stop(router, *workers)

    run_quiet(body())


def test_without_a_worker_a_request_waits_a_little_then_fails_or_is_served():
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        began_s = monotonic()
        with pytest.raises(Unavailable, match=r"no decode or unified worker .*; waited 0 s"):
            await collect(router, ask("r1"))
        assert 0.25 < monotonic() - began_s < 20.0
        with pytest.raises(DeadlineExceeded):
            await collect(router, ask("r2", left_s=0.1))
        assert not router.engine.health().serves
        await stop(router)
        router = await Router().start()
        task = asyncio.create_task(collect(router, asked := ask("r3")))
        worker = await FakeWorker((router.address,), Role.UNIFIED).start()
        assert_whole(asked, await task)
        assert worker.engine.seen[0].prefill_peers == ()
        await stop(router, worker)

    run_quiet(body())


def test_requests_stay_within_one_fingerprint_and_draining_workers_get_nothing_new():
    async def body() -> None:
        router = await Router(config=replace(FAST, worker_wait_s=0.3)).start()
        old = FakeWorker((router.address,), fingerprint="weights-1")
        new = FakeWorker((router.address,), fingerprint="weights-2")
        await fleet(old, new, router=router)
        new.draining = True
        await until(lambda: any(member.draining for member in router.engine.workers.members()))
        draining = [f'jdisagg_workers_draining{{role="{role}"}} {count}.0' for role, count in (("prefill", 0), ("decode", 1))]
        await until(lambda: set(draining) <= set(router.metrics.text().splitlines()))  # once it is connected
        assert router.engine.health().serves
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=5000), outputs))
        await until(lambda: tokens(outputs))
        assert not new.engine.seen
        new.draining = False
        await until(lambda: not any(member.draining for member in router.engine.workers.members()))
        await old.die()
        await task
        assert isinstance(outputs[-1].error, Unavailable)  # half its tokens are from other weights: it cannot go on
        assert not new.engine.seen
        assert_whole(asked := ask("r2"), await collect(router, asked))
        await stop(router, new)

    run_quiet(body())


def test_least_loaded_worker_is_chosen():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=60) for i in range(12)]
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: sum(len(worker.engine.live) for worker in workers) == 12)
        assert [len(worker.engine.live) for worker in workers] == [4, 4, 4]
        for one, task in zip(asked, tasks, strict=True):
            assert_whole(one, await task)
        await stop(router, *workers)

    run_quiet(body())
