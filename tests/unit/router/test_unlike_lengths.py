"""Workers of one model whose contexts differ, as their pools do: a request goes where it fits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role, SamplingParams
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.wire.rig import request, run_quiet, until


def ask(request_id: str, max_tokens: int) -> EngineRequest:
    return request(request_id, prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens))


async def collect(router: Router, asked: EngineRequest) -> list[Output]:
    return [output async for output in router.engine.generate(asked)]


def test_a_request_goes_to_workers_that_hold_it_and_the_model_is_as_long_as_the_longest_that_decodes() -> None:
    async def body() -> None:
        router = await Router().start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        prefill = [await FakeWorker((router.address,), Role.PREFILL, max_model_len=length).start() for length in (2, 300)]
        await until(lambda: router.linked() == 2 and len(router.engine.workers.members()) == 4)
        assert router.engine.card.max_model_len == 90
        asked = [ask(f"r{number}", max_tokens=60) for number in range(6)]
        for one, outputs in zip(asked, await asyncio.gather(*(collect(router, one) for one in asked)), strict=True):
            assert [token for output in outputs for token in output.token_ids] == expected(one)
        assert short.engine.seen == []
        assert {seen.prefill_peers for seen in long.engine.seen} == {(prefill[1].address,)}
        for worker in (short, long, *prefill):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_stream_waits_for_a_worker_that_holds_it_rather_than_break_on_a_shorter_one() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        task = asyncio.create_task(collect(router, asked := ask("r1", max_tokens=80)))
        await until(lambda: long.engine.live)
        await long.die()
        await until(lambda: router.linked() == 1)
        with pytest.raises(Unavailable, match=r"holds 83 tokens \(at most 50\)"):
            await collect(router, ask("r2", max_tokens=80))
        again = await FakeWorker((router.address,), max_model_len=90).start()
        assert [token for output in await task for token in output.token_ids] == expected(asked)
        assert short.engine.seen == []
        for worker in (short, again):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_model_is_as_long_as_the_longest_worker_that_takes_requests() -> None:
    async def body() -> None:
        router = await Router().start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        long.draining = True
        await long.registration.announce()
        assert router.engine.card.max_model_len == 50  # an answer of no stated length has a place while the other one drains
        short.draining = True
        await short.registration.announce()
        assert router.engine.card.max_model_len == 90
        for worker in (short, long):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_an_answer_of_no_stated_length_goes_on_where_less_of_it_fits() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        asked = [replace(ask(f"r{number}", max_tokens=87), fills_context=True) for number in range(2)]
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: len(long.engine.live) == 2)
        assert short.engine.seen == [], "while there is one that holds all of it"
        await until(lambda: all(len(tokens) > 2 for _, _, tokens in long.engine.live.values()))
        await long.die()
        for one, task in zip(asked, tasks, strict=True):
            outputs = await task
            assert [token for output in outputs for token in output.token_ids] == expected(one)[:47]
            assert (outputs[-1].finish, outputs[-1].error) == (FinishReason.LENGTH, None)
        assert {seen.sampling.max_tokens for seen in short.engine.seen} == {47}
        least = replace(asked[0], request_id="r3", sampling=SamplingParams(max_tokens=87, min_tokens=48))
        with pytest.raises(Unavailable, match=r"holds 51 tokens \(at most 50\)"):
            await collect(router, least)
        await short.die()
        await router.stop()

    run_quiet(body())
