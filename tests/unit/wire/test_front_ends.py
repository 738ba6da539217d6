"""Two front-ends of one worker: real engine thread, real Run streams; only the device is arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.api.generation import local_engine
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.generation.token_engine import Enough, Health
from jdisagg.api.worker.client import WorkerLink
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.errors import DeadlineExceeded, Unavailable
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import FinishReason, Output, Role
from jdisagg.roles.compute import ComputeSide
from jdisagg.roles.engine_loop import IDLE_WAIT_S
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.inbox import Cancel
from jdisagg.v1 import worker_pb2_grpc
from tests.unit.roles.engine import Engine
from tests.unit.sched.engine_fake import expected, request
from tests.unit.wire.rig import FAST, WAIT_LIMIT_S, run_quiet, start_server, until

CARD = ModelCard(name="m", max_model_len=48, vocab_size=31, eos_token_ids=(0,), fingerprint="f")
PATIENT_S = 30.0  # nobody takes a frozen engine for a stalled one


class FrontEnd:
    """What one router has got from the worker."""

    def __init__(self, address: str, name: str = "") -> None:
        self.outputs: list[Output] = []
        self.downs: list[str] = []
        self.link = WorkerLink(
            address,
            config=FAST,
            step_timeout_s=PATIENT_S,
            on_outputs=self.outputs.extend,
            on_up=lambda: None,
            on_down=self.downs.append,
            on_load=lambda load, num_cancelled: None,
            on_quiet=lambda is_quiet: None,
            waits=lambda silent_s: False,
            router=name,
        )

    def of(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.of(request_id) for token in output.token_ids]

    def ends(self) -> list[FinishReason]:
        return [output.finish for output in self.outputs if output.finish is not None]


class Worker:
    """A unified worker."""

    def __init__(self) -> None:
        self.engine = Engine(Role.UNIFIED, 24, local_prefill=True)
        self.engine.run(ComputeSide(self.engine.scheduler))
        assert self.engine.loop is not None
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(self.engine.loop, name="engine", on_crash=self.crashes.append)
        self.local = LocalEngine(self.thread, CARD, not_ready_reason=lambda: "")
        self.service = WorkerService(self.local, FAST)
        self.address = ""

    @property
    def num_posted(self) -> int:
        """Messages that the frozen engine has not looked at."""
        return self.engine.inbox._queue.qsize()

    async def freeze(self) -> None:
        """The engine looks at nothing until it is thawed."""
        self.thread.freeze()
        await asyncio.sleep(3 * IDLE_WAIT_S)  # an idle tick may be waiting for a first message
        assert self.num_posted == 0

    async def streams(self) -> list[str]:
        return (await self.local.debug_state())["streams"]


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    worker = Worker()
    server, worker.address = await start_server(
        lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker.service, server)
    )
    worker.thread.start()
    try:
        yield worker
        await until(worker.engine.scheduler.is_idle)
        assert worker.engine.scheduler.num_free_pages == worker.engine.scheduler.num_pages
    finally:
        await server.stop(0)
        worker.thread.thaw()
        assert await asyncio.to_thread(worker.thread.stop, 5.0)
    assert not worker.crashes


def checked(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_quiet(body())


@pytest.mark.covers("V36")
def test_each_front_end_gets_the_outputs_of_its_own_requests_and_no_others() -> None:
    async def body() -> None:
        async with working() as worker:
            one, other = FrontEnd(worker.address), FrontEnd(worker.address)
            asked: dict[str, tuple[FrontEnd, tuple[int, ...], int]] = {}
            for number in range(12):  # interleaved, more than there are slots
                front = (one, other)[number % 2]
                prompt, count = tuple(range(1 + number, 4 + 2 * number)), 1 + number
                asked[f"r{number}"] = (front, prompt, count)
                front.link.submit(request(f"r{number}", prompt, count))
                await asyncio.sleep(0.003 * (number % 3))
            await until(lambda: len(one.ends()) == len(other.ends()) == 6)
            for name, (front, prompt, count) in asked.items():
                stranger = other if front is one else one
                assert front.tokens(name) == expected(prompt, count)
                assert stranger.of(name) == []
            await one.link.close()
            await other.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_an_id_that_two_front_ends_use_stays_with_the_first_whatever_the_second_does() -> None:
    async def body() -> None:
        async with working() as worker:
            first = FrontEnd(worker.address)
            await until(lambda: first.link.answered)
            await worker.freeze()  # all that follows is there before the engine looks
            first.link.submit(request("same", (1, 2, 3), 20))
            await until(lambda: worker.num_posted == 1)
            second = FrontEnd(worker.address)
            second.link.submit(request("same", (4, 5), 9))
            await until(lambda: worker.num_posted == 2)
            second.link.cancel("same", 0)
            await until(lambda: worker.num_posted == 3)
            third = FrontEnd(worker.address)
            third.link.submit(request("same", (6,), 9))
            await until(lambda: worker.num_posted == 4)
            await third.link.close()
            await until(lambda: worker.num_posted == 5)  # the end of its stream cancels what came on it
            worker.thread.thaw()
            await until(lambda: first.ends() and second.ends())
            assert first.tokens("same") == expected((1, 2, 3), 20)
            assert first.ends() == [FinishReason.LENGTH]
            (refused,) = second.outputs
            assert isinstance(refused.error, Unavailable), "its router may try another worker, or wait for the end"
            assert "use a new id" in refused.error.message
            await first.link.close()
            await second.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_a_replay_of_one_router_never_ends_another_routers_request_of_that_id() -> None:
    """Refused once, the second router asks again: that is an attempt like that of a router which replays."""

    async def body() -> None:
        async with working() as worker:
            first, second = FrontEnd(worker.address, "one"), FrontEnd(worker.address, "other")
            await until(lambda: first.link.answered and second.link.answered)
            await worker.freeze()
            first.link.submit(request("same", (1, 2, 3), 20))
            await until(lambda: worker.num_posted == 1)
            second.link.submit(replace(request("same", (4, 5), 9), attempt=1))
            await until(lambda: worker.num_posted == 2)
            worker.thread.thaw()
            await until(lambda: first.ends() and second.ends())
            assert first.tokens("same") == expected((1, 2, 3), 20)
            (refused,) = second.outputs
            assert isinstance(refused.error, Unavailable)
            await first.link.close()
            await second.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_a_replay_on_a_new_stream_of_the_same_router_takes_the_place_of_the_older_attempt() -> None:
    async def body() -> None:
        async with working() as worker:
            broken = FrontEnd(worker.address, "one")
            await until(lambda: broken.link.answered)
            await worker.freeze()
            broken.link.submit(request("same", (1, 2, 3), 20))
            broken.link.submit(request("other", (1, 2), 20))
            await until(lambda: worker.num_posted == 2)
            again = FrontEnd(worker.address, "one")
            again.link.submit(replace(request("same", (1, 2, 3), 20), attempt=1))
            await until(lambda: worker.num_posted == 5)  # both are cancelled, one comes
            await until(lambda: broken.downs, what=lambda: "who opens another stream has given up the first")
            worker.thread.thaw()
            await until(again.ends)
            assert again.tokens("same") == expected((1, 2, 3), 20)
            assert broken.ends() == []
            await broken.link.close()
            await again.link.close()
            await until(lambda: worker.service.num_streams == 0)
            assert worker.service._runs == {}

    checked(body)


@pytest.mark.covers("V36")
def test_a_front_end_that_goes_takes_its_own_requests_with_it() -> None:
    async def body() -> None:
        async with working() as worker:
            stays, goes = FrontEnd(worker.address), FrontEnd(worker.address)
            await until(lambda: stays.link.answered and goes.link.answered)
            await worker.freeze()
            stays.link.submit(request("stays", (1, 2), 30))
            goes.link.submit(request("goes", (3, 4), 30))
            await until(lambda: worker.num_posted == 2)
            await goes.link.close()
            await until(lambda: worker.num_posted == 3)
            worker.thread.thaw()
            await until(stays.ends)
            assert stays.tokens("stays") == expected((1, 2), 30)
            assert goes.outputs == []
            assert await worker.streams() == []
            await stays.link.close()

    checked(body)


@pytest.mark.parametrize(("enough", "reason"), [(True, "stop"), (False, "abort")])
def test_a_stop_string_counts_as_a_stop_and_a_client_that_leaves_as_an_abort(enough: bool, reason: str) -> None:
    async def body() -> None:
        async with working() as worker:
            await worker.freeze()  # so that nothing ends by itself
            sink: Callable[[list[Output]], None] = lambda outputs: None  # noqa: E731
            worker.local.submit(request("own", (1, 2), 40), sink)
            worker.local.cancel("own", 0, sink, enough=enough)
            worker.thread.thaw()
            finished = worker.engine.metrics.requests.finished
            await until(lambda: finished.labels(reason=reason)._value.get() == 1)

    checked(body)


def test_a_worker_that_drains_is_healthy_and_not_ready() -> None:
    async def body() -> None:
        worker = Worker()
        worker.thread.start()
        assert worker.local.health() == Health(healthy=True, ready=True)
        assert await worker.local.drain(monotonic() + 5.0) == 0
        assert worker.local.health() == Health(healthy=True, ready=False, reason="draining")
        worker.thread.stop()

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
            worker.thread.thaw()
            assert await drained == 0
            assert (await asked)[-1].finish is FinishReason.LENGTH

    checked(body)


def test_a_replay_of_a_router_without_a_name_ends_no_request_of_the_workers_own_clients() -> None:
    async def body() -> None:
        async with working() as worker:
            router = FrontEnd(worker.address)
            await until(lambda: router.link.answered)
            await worker.freeze()
            own = asyncio.create_task(everything(worker, "same"))
            await until(lambda: worker.num_posted == 1)
            router.link.submit(replace(request("same", (4, 5), 9), attempt=1))
            await until(lambda: worker.num_posted == 2)
            worker.thread.thaw()
            assert (await own)[-1].finish is FinishReason.LENGTH
            await until(router.ends)
            assert isinstance(router.outputs[0].error, Unavailable)
            await router.link.close()

    checked(body)


def test_outputs_of_one_tick_cross_to_the_loop_together() -> None:
    async def body() -> None:
        async with working() as worker:
            sizes: list[int] = []
            deliver = worker.local._deliver

            def counted(outputs: list[Output]) -> None:
                sizes.append(len(outputs))
                deliver(outputs)

            worker.local._deliver = counted
            await worker.freeze()
            asked = [asyncio.create_task(everything(worker, f"r{number}")) for number in range(3)]
            await until(lambda: worker.num_posted == 3)
            worker.thread.thaw()
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
            worker.thread.thaw()

    checked(body)


async def everything(worker: Worker, request_id: str) -> list[Output]:
    return [output async for output in worker.local.generate(request(request_id, (1, 2, 3), 8))]
