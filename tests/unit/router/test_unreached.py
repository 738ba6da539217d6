"""A worker that registers and that its router cannot reach: heartbeats come, a stream does not. The operator is told."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace

import pytest

from jdisagg.core.requests import Output
from jdisagg.router.worker_news import MANY_MISSES
from tests.unit.ports import kept_port
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, stop
from tests.unit.wire.rig import FAST, run_quiet, until

NOBODY = "no decode or unified worker is connected"


def test_a_worker_that_registers_where_nobody_listens_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def told(what: str = "does not reach it") -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [line for line in lines if what in line]

    async def body() -> None:
        router = await Router().start()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
            worker = await FakeWorker((router.address,), epoch="e").start(advertised=nowhere)
            await until(told)
            (entry,) = router.engine.workers.fleet.entries()
            assert f"fake @ {nowhere} has registered" in told()[0]
            assert "UNAVAILABLE" in told()[0]
            misses = entry.reach.misses
            await until(lambda: entry.reach.misses > misses + 1)
            reason = router.engine.health().reason
            await until(lambda: told("does not reach this worker"))
        await worker.die()
        assert reason == f"{NOBODY} (fake @ {nowhere} has registered, and this router does not reach it)"
        assert len(told()) == 1
        (line,) = told("does not reach this worker")  # in the log of the worker, whose heartbeats arrive
        assert line.startswith(f"router {router.address} does not reach this worker at {nowhere}: UNAVAILABLE")
        assert line.endswith("look at --advertise-host and --advertise-port, and at firewalls")

        heir = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        assert_whole(asked := ask("r1"), await collect(router, asked))
        await stop(router, heir)

    run_quiet(body())


def test_a_worker_that_has_ended_is_not_taken_for_one_that_nobody_reaches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdisagg.router.workers.RECONNECT_S", 0.05)

    async def body() -> None:
        router = await Router(config=replace(FAST, dead_after_s=60.0)).start()
        worker = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        (entry,) = router.engine.workers.fleet.entries()
        await worker.die()
        await until(lambda: entry.reach.misses > 2 * MANY_MISSES)
        assert router.engine.health().reason == NOBODY
        assert "does not reach" not in caplog.text
        await router.stop()

    run_quiet(body())


def test_a_worker_that_is_reached_again_is_no_longer_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        router = await Router().start()
        with kept_port() as port:
            early = await FakeWorker((router.address,), epoch="e").start(advertised=f"127.0.0.1:{port}")
            await until(lambda: "does not reach it" in router.engine.health().reason)
            there = await FakeWorker((), epoch="e").start(port)
        await until(lambda: router.linked() == 1)
        assert router.engine.health().reason == ""
        assert [entry.reach.misses for entry in router.engine.workers.fleet.entries()] == [0]
        await until(lambda: f"router {router.address} reaches this worker" in caplog.text)
        await early.die()
        await there.die()
        await until(lambda: not router.engine.workers.members())
        assert router.engine.health().reason == NOBODY
        await router.stop()

    run_quiet(body())


def test_a_worker_whose_address_leads_to_another_one_is_told_of_and_takes_nothing_from_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        router = await Router().start()
        well = await FakeWorker((router.address,)).start()
        await until(lambda: router.linked() == 1)
        wrong = f"localhost:{well.port}"  # both names are of the same machine
        lost = await FakeWorker((router.address,)).start(advertised=wrong)
        asked, outputs = ask("r1", max_tokens=300), list[Output]()
        answer = asyncio.create_task(collect(router, asked, outputs))
        why = "this router does not reach it: FAILED_PRECONDITION: this is a fake, and another process is meant"
        line = f"decode worker fake @ {wrong} has registered, and {why}"
        await until(lambda: line in caplog.text)
        await until(
            lambda: f"router {router.address} does not reach this worker at {wrong}: FAILED_PRECONDITION" in caplog.text
        )
        await answer
        assert_whole(asked, outputs)
        assert router.replays() == 0
        assert router.linked() == 1
        assert "is lost" not in caplog.text
        await lost.die()
        await stop(router, well)

    run_quiet(body())
