"""A Register that the network kept until its process was gone and another one served at the address."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from dataclasses import replace
from time import monotonic

import pytest

from jdisagg.core.errors import AddressTaken, Unavailable
from jdisagg.core.fleet import Load, Member, Report
from jdisagg.core.requests import Output, Role, SamplingParams
from jdisagg.router import workers
from jdisagg.router.fleet import Fleet
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import collect, tokens
from tests.unit.wire.rig import FAST, member, request, run_quiet, until

MEMBER = member(role=Role.PREFILL, worker="p", epoch="new")


def test_an_address_is_its_process_until_that_falls_silent() -> None:
    fleet = Fleet(dead_after_s=1.0)
    assert fleet.register(MEMBER, 10.0) is None
    assert fleet.heartbeat("h:1", "new", Report(Load()), 11.0)
    other = replace(MEMBER, epoch="other")
    for now_s in (11.0, 12.0):
        with pytest.raises(Unavailable, match="was heard less than 1 s ago"):
            fleet.register(other, now_s)
        assert fleet.members() == [MEMBER]
    replaced = fleet.register(other, 12.1)
    assert replaced is not None
    assert replaced.member == MEMBER
    assert fleet.members() == [other]


def test_a_late_registration_of_a_process_that_is_gone_costs_no_stream_its_worker() -> None:
    async def body() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        asked = request("r", prompt=(5, 6), sampling=SamplingParams(max_tokens=60))
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, asked, outputs))
        await until(lambda: len(outputs) >= 3)
        (known,) = router.engine.workers.members()
        with pytest.raises(Unavailable):
            router.engine.workers.register(replace(known, epoch="gone"))
        await task
        assert tokens(outputs) == expected(asked)
        assert router.replays() == 0
        await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_router_that_stood_still_takes_no_process_for_gone_that_it_had_no_time_to_hear() -> None:
    """It may read the other's Register first when it goes on."""

    async def body() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        (known,) = router.engine.workers.members()

        def is_registered() -> bool:
            try:
                router.engine.workers.register(replace(known, epoch="other"))
            except AddressTaken:
                return False
            return True

        for _ in range(2):
            time.sleep(2 * FAST.dead_after_s)
            assert not is_registered()
        assert router.linked() == 1
        await worker.die()
        await until(is_registered)
        await router.stop()

    run_quiet(body())


def test_a_router_that_stands_still_as_it_takes_a_registration_in_takes_no_process_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two of its looks at a clock."""

    async def body() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        (known,) = router.engine.workers.members()
        looks = itertools.count(step=2 * FAST.dead_after_s)
        with monkeypatch.context() as patch:
            patch.setattr(workers, "monotonic", lambda: monotonic() + next(looks))
            with pytest.raises(AddressTaken):
                router.engine.workers.register(replace(known, epoch="other"))
        await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_router_that_stands_still_as_it_looks_after_its_workers_takes_no_process_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That time, too, is not their silence."""
    told: list[str] = []

    async def body() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,), Role.PREFILL).start()
        await until(router.engine.workers.members)
        (known,) = router.engine.workers.members()

        def register() -> None:
            try:
                router.engine.workers.register(replace(known, epoch="other"))
            except AddressTaken as error:
                told.append(error.message)
            else:
                told.append("registered")

        def stand_still(*_: object) -> list[str]:
            if not told:
                time.sleep(2 * FAST.dead_after_s)
                asyncio.get_running_loop().call_soon(register)  # before anything that comes by a socket
            return []

        monkeypatch.setattr(workers.FleetWatch, "look", stand_still)
        await until(lambda: told)
        await worker.die()
        await router.stop()

    run_quiet(body())
    assert "was heard" in told[0]


def test_a_registration_at_a_router_that_is_closed_is_refused_and_opens_no_stream() -> None:
    async def body() -> None:
        router = await Router().start()
        await router.engine.close()
        worker = await FakeWorker((router.address,)).start()
        await asyncio.sleep(0.3)
        assert worker.service.num_streams == 0
        with pytest.raises(Unavailable, match="the router is ending"):
            router.engine.workers.register(replace(MEMBER, role=Role.DECODE, address=worker.address))
        assert worker.registration.registered() == {router.address: False}
        assert router.engine.workers.members() == []
        await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_worker_whose_address_is_anothers_says_so_whenever_that_begins(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        fleet = router.engine.workers.fleet
        told = "does not take this worker: fake @ .* cannot register: the usurper of that address was heard"
        for times in (1, 2):
            (entry,) = fleet.entries()
            other = replace(entry.member, epoch=f"other-{times}", worker="the usurper")
            fleet.remove(entry)
            fleet.register(other, monotonic())

            def is_told(other: Member = other, times: int = times) -> bool:
                fleet.heartbeat(other.address, other.epoch, Report(Load()), monotonic())  # until then
                return len(re.findall(told, caplog.text)) == times

            await until(is_told)
            await until(lambda: fleet.members() and fleet.members()[0].epoch == worker._member["epoch"])
        await asyncio.sleep(0.1)
        assert len(re.findall(told, caplog.text)) == 2, "once each time, however often it tries"
        assert "does not answer" not in caplog.text
        await worker.die()
        await router.stop()

    run_quiet(body())
