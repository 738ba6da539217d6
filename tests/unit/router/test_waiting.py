"""A request that waits for a worker in vain: how long, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import replace
from time import monotonic

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, Unavailable
from jdisagg.core.requests import Output, Role
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, collect, fleet, stop, tokens
from tests.unit.router.test_weights_and_choices import choices
from tests.unit.wire.rig import FAST, run_quiet, until

NOBODY = "no decode or unified worker is connected"


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record for record in caplog.records if "failed; it waited" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in told)
    return [record.getMessage() for record in told]


def test_streams_that_wait_for_another_worker_in_vain_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.05), config=replace(FAST, worker_wait_s=0.4)).start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        streams: list[list[Output]] = [[] for _ in range(3)]
        tasks = [asyncio.create_task(collect(router, ask(f"r{i}", 5000), outputs)) for i, outputs in enumerate(streams)]
        await until(lambda: all(tokens(outputs) for outputs in streams))
        began_s = monotonic()
        await worker.die()
        await asyncio.gather(*tasks)
        assert 0.3 < monotonic() - began_s < 20.0, "a new request's wait is shorter"
        for outputs in streams:
            assert isinstance(outputs[-1].error, Unavailable)
            assert f"{NOBODY}; waited 0 s: start one of fingerprint weights-1, or" in outputs[-1].error.message
        await router.stop()

    run_quiet(body())
    told = sorted(failures(caplog))
    assert len(told) == 3
    for i, line in enumerate(told):
        pattern = rf"request r{i}: failed; it waited \d+\.\d\d s for a worker, behind \d+ tokens: {NOBODY}"
        assert re.fullmatch(pattern, line), line


def test_a_request_that_comes_before_any_worker_waits_for_one() -> None:
    """A router that restarted is spoken to before its fleet has found it again."""

    async def body() -> None:
        router = await Router().start()
        asked = asyncio.create_task(router.engine.first_card(monotonic() + 60.0))
        await asyncio.sleep(0.05)
        assert not asked.done()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        assert (await asked).fingerprint == "weights-1"
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.parametrize("is_first", [True, False])
def test_time_in_which_the_router_stood_still_is_no_wait_for_a_worker(is_first: bool) -> None:
    """Registrations that came meanwhile have yet to be read."""

    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=1.5), config=replace(FAST, worker_wait_s=1.5)).start()

        async def answer() -> list[Output]:
            if is_first:
                await router.engine.first_card(monotonic() + 60.0)
            return await collect(router, ask("r1"))

        asked = asyncio.create_task(answer())
        await asyncio.sleep(0.3)
        time.sleep(2.0)  # the whole process
        await asyncio.sleep(0.1)
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        assert tokens(await asked)
        await stop(router, worker)

    run_quiet(body())


def test_a_request_that_no_worker_takes_fails_in_its_time_however_slowly_the_router_turns() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=3.0)).start()
        asked = asyncio.create_task(collect(router, ask("r1")))
        began_s = monotonic()
        while not asked.done() and monotonic() < began_s + 40.0:
            time.sleep(1.1)  # between any two looks
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match=NOBODY):
            await asked
        await router.stop()

    run_quiet(body())


@pytest.mark.parametrize("why", ["nobody comes", "its deadline", "the router drains"])
def test_a_request_that_comes_before_any_worker_does_not_wait_for_ever(why: str) -> None:
    told = (
        "the router is draining" if why == "the router drains" else "no worker that decodes has registered with this router yet"
    )

    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.2 if why == "nobody comes" else 60.0)).start()
        asked = asyncio.create_task(router.engine.first_card(monotonic() + (0.2 if why == "its deadline" else 60.0)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asked.done()
        if why == "the router drains":
            await router.engine.drain(monotonic())
        with pytest.raises(Unavailable, match=told):
            async with asyncio.timeout(30.0):
                await asked
        with pytest.raises(Unavailable, match=told):
            assert router.engine.card
        await router.stop()

    run_quiet(body())


def test_a_new_request_never_waits_longer_than_a_lost_one(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=60.0), config=replace(FAST, worker_wait_s=0.1)).start()
        began_s = monotonic()
        with pytest.raises(Unavailable, match=rf"{NOBODY}; waited 0 s: start one, or"):
            await collect(router, ask("r1"))
        assert monotonic() - began_s < 30.0
        with pytest.raises(DeadlineExceeded, match=NOBODY):
            await collect(router, ask("r2", left_s=0.05))
        await router.stop()

    run_quiet(body())
    one, other = failures(caplog)
    assert re.fullmatch(rf"request r1: failed; it waited \d+\.\d\d s for a worker, before its first token: {NOBODY}", one)
    late = rf"request r2: failed; it waited \d+\.\d\d s for a worker, before .*: its deadline passed \({NOBODY}\)"
    assert re.fullmatch(late, other)


def test_a_deadline_that_nobody_could_keep_blames_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        with pytest.raises(DeadlineExceeded, match=r"its deadline passed before a worker took it$"):
            await collect(router, ask("r1", left_s=0.0))
        await worker.die()
        await router.stop()

    run_quiet(body())
    assert failures(caplog) == []


def test_a_deadline_that_passes_after_a_worker_gave_the_request_back_names_what_the_worker_said() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(max_refusals=10_000)).start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.refuse = HandoffLost("no usable prefill worker")
        number = 0
        while not worker.engine.seen:  # a machine that stands still may let one end before it is there
            number += 1
            (ended,) = await collect(router, ask(f"r{number}", left_s=0.4 * number))
            assert isinstance(ended.error, DeadlineExceeded)
        said = f"request r{number}: its deadline passed before it could go on (no usable prefill worker)"
        assert ended.error.message == said
        await stop(router, worker)

    run_quiet(body())


def test_a_worker_that_has_its_prefill_workers_is_not_said_to_lack_one(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.05)).start()
        decode = FakeWorker((router.address,), needs_prefill=True, max_model_len=50)
        prefill = FakeWorker((router.address,), Role.PREFILL)
        await fleet(decode, prefill, router=router)
        await until(lambda: router.engine.health().serves)
        with pytest.raises(DeadlineExceeded, match=r"its deadline passed before a worker took it$"):
            await collect(router, ask("r1", left_s=0.0))
        assert failures(caplog) == []
        with pytest.raises(Unavailable, match=r"r2: no decode .* holds 83 tokens \(at most 50\); waited"):
            await collect(router, ask("r2", 80))
        await stop(router, decode, prefill)

    run_quiet(body())


def test_only_workers_that_hold_the_request_count_as_those_that_drain() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.05)).start()
        short, long = [FakeWorker((router.address,), max_model_len=length) for length in (50, 90)]
        await fleet(short, long, router=router)
        long.draining = True
        await long.announce()
        told = rf"every decode or unified worker that holds 83 tokens is draining \(fake @ {long.address}\)"
        with pytest.raises(Unavailable, match=told):
            await collect(router, ask("r1", 80))
        await stop(router, short, long)

    run_quiet(body())


def test_a_choice_whose_siblings_speak_weights_that_are_gone_says_so() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.05)).start()
        old, new = [FakeWorker((router.address,), fingerprint=f"weights-{number}") for number in (1, 2)]
        await fleet(old, router=router)
        first, second = choices("r", 2, 5000)
        heard: list[Output] = []
        speaking = asyncio.create_task(collect(router, first, heard))
        await until(lambda: tokens(heard))
        await old.die()
        await until(lambda: not router.linked())
        await fleet(new, router=router)
        with pytest.raises(Unavailable, match=rf"r/1: {NOBODY}; waited 0 s: start one of fingerprint weights-1,"):
            await collect(router, second)
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        await stop(router, new)

    run_quiet(body())


def test_a_scrape_shows_requests_that_run_and_that_wait() -> None:
    async def body() -> None:
        router = await Router(config=replace(FAST, worker_wait_s=5.0)).start()

        def shown() -> tuple[int, int]:
            found = re.findall(r'jdisagg_requests\{state="(\w+)"\} (\d+)\.0', router.metrics.text())
            assert [state for state, _ in found] == ["running", "waiting"]
            return int(found[0][1]), int(found[1][1])

        assert shown() == (0, 0)
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        outputs: list[Output] = []
        running = [asyncio.create_task(collect(router, ask(f"r{i}", 10_000), outputs)) for i in range(3)]
        await until(lambda: len(worker.engine.live) == 3)
        assert shown() == (3, 0)
        await worker.die()
        await until(lambda: shown() == (0, 3))
        heir = FakeWorker((router.address,))
        await heir.start()
        await until(lambda: shown() == (3, 0))
        await until(lambda: "jdisagg_prompt_tokens_total 9.0" in router.metrics.text())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert shown() == (0, 0)
        await until(lambda: not heir.engine.live)
        await heir.die()
        await router.stop()

    run_quiet(body())
