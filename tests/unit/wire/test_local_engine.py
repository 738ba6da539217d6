"""The engine as a worker's own clients see it: how their requests end, and what its drain waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.api.generation import local_engine
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.generation.token_engine import Enough, Health
from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.requests import FinishReason, Output
from jdisagg.roles.inbox import Cancel
from tests.unit.sched.engine_fake import request
from tests.unit.wire.rig import WAIT_LIMIT_S, until
from tests.unit.wire.unified_worker import CARD, Worker, checked, everything, working


@pytest.mark.parametrize(("enough", "reason"), [(True, "stop"), (False, "abort")])
def test_a_stop_string_counts_as_a_stop_and_a_client_that_leaves_as_an_abort(enough: bool, reason: str) -> None:
    async def body() -> None:
        async with working() as worker:
            await worker.freeze()  # so that nothing ends by itself
            sink: Callable[[list[Output]], None] = lambda outputs: None  # noqa: E731
            worker.local.submit(request("own", (1, 2), 40), sink)
            worker.local.cancel("own", 0, sink, enough=enough)
            worker.thread.is_frozen = False
            finished = worker.engine.metrics.requests.finished
            await until(lambda: finished.labels(reason=reason)._value.get() == 1)

    checked(body)


def test_a_worker_that_drains_is_healthy_and_not_ready() -> None:
    async def body() -> None:
        worker = Worker()
        worker.thread.start()
        assert worker.local.health() == Health()
        assert await worker.local.drain(monotonic() + 5.0) == 0
        assert worker.local.health() == Health(reason="draining")
        worker.thread.stop()

    checked(body)


def test_an_engine_has_answered_though_the_loop_that_asked_stood_still_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of the machine: who asks what goes on is not told that the engine hangs."""
    monkeypatch.setattr(local_engine, "ANSWER_TIMEOUT_S", 0.05)

    async def body() -> None:
        async with working() as worker:
            await worker.freeze()
            asked = asyncio.create_task(worker.local.debug_state())
            for _ in range(3):  # until it has asked
                await asyncio.sleep(0)
            worker.thread.is_frozen = False
            time.sleep(0.2)
            assert "scheduler" in await asked

    checked(body)


@pytest.mark.parametrize("drain_s", [0.0, -1.0])
def test_an_idle_worker_has_nothing_unfinished_however_short_its_drain_is(
    drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "LOOK_S", WAIT_LIMIT_S)  # its thread may not have its turn for longer than LOOK_S

    async def body() -> None:
        worker = Worker()
        worker.thread.start()
        assert await worker.local.drain(monotonic() + drain_s) == 0
        worker.thread.stop()

    checked(body)


@pytest.mark.parametrize("enough", [True, False])
def test_the_engine_hears_why_nobody_listens_any_more(enough: bool) -> None:
    async def body() -> None:
        posted: list[Any] = []
        thread: Any = SimpleNamespace(loop=SimpleNamespace(inbox=SimpleNamespace(post=posted.append)))
        local = LocalEngine(thread, CARD, not_ready_reason=lambda: "")
        outputs = local.generate(request("own", (1, 2), 40))
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: posted)
        posted[0].sink([Output(request_id="own", token_ids=(7,))])
        await first
        if enough:
            with pytest.raises(Enough):
                await outputs.athrow(Enough())
        else:
            await outputs.aclose()
        assert posted[1:] == [Cancel("own", 0, local._sink, enough)]

    checked(body)


def test_a_drain_waits_for_a_request_that_the_engine_has_not_looked_at_yet() -> None:
    async def body() -> None:
        async with working() as worker:
            await worker.freeze()  # in the middle of a long step
            asked = asyncio.create_task(everything(worker, "r"))
            await until(lambda: worker.num_posted == 1)
            drained = asyncio.create_task(worker.local.drain(monotonic() + 10.0))
            assert await worker.local.drain(monotonic() + 0.1) == 1, "it cannot know that there is nothing"
            assert not drained.done()
            worker.thread.is_frozen = False
            assert await drained == 0
            assert (await asked)[-1].finish is FinishReason.LENGTH

    checked(body)


def test_a_drain_waits_until_the_last_output_has_come_to_its_client() -> None:
    """The engine has ended the request, and the loop has not turned since: who shuts down then takes its end from it."""

    async def body() -> None:
        async with working() as worker:
            held: list[Output] = []
            cross, worker.local._sink = worker.local._sink, held.extend
            asked = asyncio.create_task(everything(worker, "r"))
            await until(lambda: held and held[-1].finish is not None)
            drained = asyncio.create_task(worker.local.drain(monotonic() + 10.0))
            assert await worker.local.drain(monotonic() + 0.2) == 1
            assert not drained.done()
            cross(held)
            assert await drained == 0
            worker.local.close()
            assert (await asked)[-1].finish is FinishReason.LENGTH

    checked(body)


def test_outputs_of_one_tick_cross_to_the_loop_together() -> None:
    async def body() -> None:
        async with working() as worker:
            sizes: list[int] = []
            cross = worker.local._sink

            def counted(outputs: list[Output]) -> None:
                sizes.append(len(outputs))
                cross(outputs)

            worker.local._sink = counted
            await worker.freeze()
            asked = [asyncio.create_task(everything(worker, f"r{number}")) for number in range(3)]
            await until(lambda: worker.num_posted == 3)
            worker.thread.is_frozen = False
            await asyncio.gather(*asked)
            assert max(sizes) == 3

    checked(body)


def test_a_request_of_whose_engine_nothing_is_heard_ends_behind_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "DEADLINE_GRACE_S", 0.2)

    async def body() -> None:
        async with working() as worker:
            await worker.freeze()
            asked = replace(request("own", (1, 2), 8), deadline_s=monotonic() + 0.1)
            with pytest.raises(DeadlineExceeded, match="no answer from the engine"):
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await anext(worker.local.generate(asked))
            await until(lambda: worker.num_posted == 2)  # the request, and that nobody waits for it
            worker.thread.is_frozen = False

    checked(body)
