"""Streams that survive their workers: every token once, in order, whatever dies."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from time import monotonic

import pytest

from jdisagg.core.requests import EngineRequest, Output
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.wire.rig import FAST, run_quiet, until


def test_a_stream_goes_on_exactly_when_its_worker_dies(caplog):
    caplog.set_level(logging.INFO, logger="jdisagg")

    async def body() -> None:
        router = await Router().start()
        d1, d2 = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        asked = ask("r1")
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, asked, outputs))
        await until(lambda: len(tokens(outputs)) >= 5)
        victim, heir = (d1, d2) if d1.engine.live else (d2, d1)
        before = len(tokens(outputs))
        began_s = monotonic()
        await victim.die()
        assert await until(lambda: heir.engine.live) < 1.2
        await task
        lasted_s = monotonic() - began_s
        assert_whole(asked, outputs)
        assert len(heir.engine.seen[-1].generated_token_ids) >= before
        assert heir.engine.seen[-1].attempt == 1
        provenance = outputs[-1].provenance
        assert provenance is not None
        assert provenance.recoveries == ("replay", "refetch")
        assert router.replays() == 1
        (told,) = (record.getMessage() for record in caplog.records if "goes on" in record.getMessage())
        said = re.fullmatch(r"request r1: goes on (\d+\.\d\d) s after it was lost; attempt 1, worker (.+)", told)
        assert said
        assert float(said[1]) <= lasted_s + 0.01
        assert said[2] == f"fake @ {heir.address}"
        text = router.metrics.text().splitlines()
        assert "jdisagg_time_to_first_token_seconds_count 1.0" in text
        assert "jdisagg_inter_token_latency_seconds_count 39.0" in text  # the gap of the replay included
        assert 'jdisagg_requests_finished_total{reason="length"} 1.0' in text
        await stop(router, heir)

    run_quiet(body())


@pytest.mark.covers("X14")
def test_a_silent_worker_is_left_within_about_dead_after():
    async def body() -> None:
        router = await Router().start()
        mute = FakeWorker((router.address,), config=FAST.__class__(heartbeat_s=20.0, dead_after_s=60.0))
        (mute,) = await fleet(mute, router=router)
        mute.engine.frozen = True  # no outputs, no heartbeats: as after SIGSTOP
        asked = ask("r1")
        task = asyncio.create_task(collect(router, asked))
        took_s = await until(lambda: mute.engine.seen)
        heir = await FakeWorker((router.address,)).start()
        assert took_s + await until(lambda: heir.engine.seen) < 1.2
        assert_whole(asked, await task)
        await mute.die()
        await stop(router, heir)

    run_quiet(body())


def test_two_hundred_streams_survive_random_deaths():
    async def body() -> None:
        chance = random.Random(7)
        router = await Router(ReplayConfig(max_deaths=6)).start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=chance.randint(20, 150)) for i in range(200)]

        async def one(item: EngineRequest) -> list[Output]:
            await asyncio.sleep(chance.random() * 0.5)
            return await collect(router, item)

        tasks = [asyncio.create_task(one(item)) for item in asked]
        for _ in range(4):
            await asyncio.sleep(0.25)
            victim = workers.pop(chance.randrange(len(workers)))
            await victim.die()
            workers.append(await FakeWorker((router.address,)).start(int(victim.address.rpartition(":")[2])))
        for item, task in zip(asked, tasks, strict=True):
            assert_whole(item, await task)
        assert router.replays() > 20
        await stop(router, *workers)

    run_quiet(body())


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ((-3,), r"sent token -3, wanted one of \[0, 1000\)"),
        ((1000,), r"sent token 1000, wanted one of \[0, 1000\)"),
        ((5,) * 41, "sent 41 tokens, wanted 40 at most"),
    ],
)
def test_tokens_that_no_worker_of_the_model_sends_are_not_delivered(
    odd: tuple[int, ...], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        router = await Router().start()
        liar, other = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        liar.engine.frozen = other.engine.frozen = True
        task = asyncio.create_task(collect(router, asked := ask("r1")))
        await until(lambda: liar.engine.live or other.engine.live)
        if other.engine.live:
            liar, other = other, liar
        liar.engine.say(Output(request_id="r1", attempt=0, token_ids=odd))
        other.engine.frozen = False  # and not the liar, whose next token could travel with these
        assert_whole(asked, await task)
        assert [seen.generated_token_ids for seen in other.engine.seen] == [()]
        await stop(router, liar, other)

    run_quiet(body())
    assert re.search(rf"request r1: recovering by replay; .*{told}; take it, or", caplog.text)
