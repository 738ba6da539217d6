"""What befell a worker, and whether the requests that it had are to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos_kit.proxy import Proxy

from jdisagg.api.worker.client import CLOSED, SILENT
from jdisagg.core.errors import Deadly, HandoffLost
from jdisagg.router.entry import Entry
from jdisagg.router.setbacks import Lost, Setbacks
from jdisagg.router.worker_news import EVICTED
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, stop
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import run_quiet, until


@pytest.mark.parametrize(
    ("reason", "draining", "death"),
    [(CLOSED, False, False), (CLOSED, True, False), ("reset", True, False), ("reset", False, True), (SILENT, False, True)],
)
def test_a_worker_died_unless_it_was_about_to_end_or_closed_the_stream_itself(reason: str, draining: bool, death: bool) -> None:
    entry = Entry(replace(MEMBER, draining=draining), 0.0)
    lost = Lost.of(entry, reason)
    assert (lost.death, lost.worker, lost.reason) == (death, entry.key if death else None, reason)
    assert isinstance(lost.error, HandoffLost)
    assert entry.member.worker in lost.error.message
    assert reason in lost.error.message


@pytest.mark.parametrize(("reason", "deaths"), [("reset", 1.0), (SILENT, 0.5), (EVICTED, 0.5)])
def test_a_worker_that_is_back_did_not_die_of_a_request(reason: str, deaths: float) -> None:
    setbacks, entry = Setbacks(), Entry(MEMBER, 0.0)
    setbacks.blame_for(Lost.of(entry, reason), 1)
    assert setbacks.blame == deaths
    setbacks.is_back(("another", "worker"))
    assert setbacks.blame == deaths
    setbacks.is_back(entry.key)
    assert setbacks.blame == 0.0


def test_a_worker_that_closed_its_stream_and_one_that_gave_the_request_back_speak_against_nobody() -> None:
    setbacks = Setbacks()
    setbacks.blame_for(Lost.of(Entry(MEMBER, 0.0), CLOSED), 1)
    setbacks.blame_for(Lost(HandoffLost("every rung failed"), death=False), 2)
    assert setbacks.blame == 0


def test_prefill_workers_that_went_down_with_a_request_are_one_death_an_attempt_whoever_told_of_them_and_comes_back() -> None:
    setbacks, entry = Setbacks(), Entry(MEMBER, 0.0)
    for attempt in (1, 1, 2):
        setbacks.blame_for(Lost.told(Deadly("they may have died of it", num_down=4)), attempt)
    setbacks.blame_for(Lost.of(entry, "reset"), 2)
    setbacks.is_back(entry.key)
    assert setbacks.blame == 2.0


@pytest.mark.parametrize(("first", "then", "deaths"), [("reset", EVICTED, 1.0), (SILENT, "reset", 0.5)])
def test_an_attempt_is_lost_once_whatever_becomes_of_its_worker(first: str, then: str, deaths: float) -> None:
    setbacks, entry = Setbacks(), Entry(MEMBER, 0.0)
    for reason in (first, then):
        setbacks.blame_for(Lost.of(entry, reason), 1)
    assert setbacks.blame == deaths
    setbacks.blame_for(Lost.of(Entry(replace(MEMBER, epoch="next"), 0.0), "reset"), 2)
    assert setbacks.blame == deaths + 1.0


def test_a_worker_that_is_back_before_a_slow_client_reads_on_is_not_held_against_its_request() -> None:
    async def body() -> None:
        router, proxy = await Router().start(), await Proxy(lambda *_: None).start()
        worker = FakeWorker((router.address,))
        await worker.start(advertised=f"127.0.0.1:{proxy.port}")
        proxy.target_port = worker.port
        await until(lambda: router.linked() == 1)
        stream = router.engine.generate(ask("r1", max_tokens=5000))
        try:
            await anext(stream)
            (entry,), (flight,) = router.engine.workers.fleet.entries(), router.engine._flights.values()
            before = entry.stream
            proxy.cut()
            await until(lambda: flight.setbacks.blame > 0.0)
            await until(lambda: entry.linked and entry.stream is not before)
            while flight.attempt == 1:  # it reads on: first what came before the cut
                await anext(stream)
            assert flight.setbacks.blame == 0.0
        finally:
            await stream.aclose()
            await until(lambda: not worker.engine.live)
            await stop(router, worker)
            await proxy.close()

    run_quiet(body())
