"""A full queue at each edge, with the real scheduler and engine thread behind it: HTTP 429 with Retry-After, gRPC
RESOURCE_EXHAUSTED with RetryInfo, both also through a router; and the trace context on the same ways."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jdisagg.api.codec import error_from_rpc, refuse
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Job
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.api.generation.service import GenerationServicer
from jdisagg.api.generation.token_engine import TokenEngine
from jdisagg.api.http.app import make_app
from jdisagg.api.http.server import HttpServer
from jdisagg.api.listening import listen
from jdisagg.api.worker.service import WorkerService
from jdisagg.core.errors import InvalidRequest, Overloaded
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import EngineRequest, Role, SamplingParams
from jdisagg.roles import engine_thread
from jdisagg.roles.engine_thread import EngineThread
from jdisagg.roles.unified import UnifiedRole
from jdisagg.router.flight import Flight
from jdisagg.sched.plan import StepResult
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import fleet_pb2, fleet_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.unit.api_edge.fakes import FakeEngine, living, run, serving
from tests.unit.roles.engine import Engine
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import FAST, start_server, until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STEP_S = 0.02
LONG_STEP_S = 0.25
LONG = {"prompt": [1, 2, 3], "max_tokens": 40, "extra_body": {"ignore_eos": True}}


class Worker:
    """A unified engine on its thread: one slot, one place in the queue, `step_s` a step."""

    def __init__(self, vocab_size: int, step_s: float = STEP_S, **options: Any) -> None:
        self.step_s = step_s
        self.engine = Engine(Role.UNIFIED, 40, True, max_num_seqs=1, max_queue_len=1)
        collect = self.engine.runner.collect

        def slow(handle: StepResult) -> StepResult:
            time.sleep(self.step_s)
            return collect(handle)

        self.engine.runner.collect = slow  # type: ignore[method-assign]
        self.engine.run(UnifiedRole(self.engine.scheduler), **options)
        assert self.engine.loop is not None
        self.thread = EngineThread(self.engine.loop, name="engine", on_crash=lambda error: None)
        self.thread.start()
        card = ModelCard(name="tiny", max_model_len=48, vocab_size=vocab_size, eos_token_ids=(), fingerprint="weights-1")
        self.local = LocalEngine(self.thread, card, not_ready_reason=lambda: "")

    async def fill(self, client: openai.AsyncOpenAI) -> list[asyncio.Task[Any]]:
        """Two requests: one runs, one waits; the queue is full from now on, for forty steps."""
        tasks = []
        for waiting in (0, 1):
            tasks.append(asyncio.create_task(client.completions.create(model="tiny", **LONG)))
            await until(lambda waiting=waiting: (self.local.load.running, self.local.load.waiting) == (1, waiting))
        return tasks


@asynccontextmanager
async def edge_over(engine: TokenEngine, tokenizer: Tokenizer) -> AsyncIterator[tuple[openai.AsyncOpenAI, Any]]:
    """An HTTP client and a gRPC stub of a real edge over `engine`."""
    edge = Edge(engine, tokenizer, default_deadline_s=60.0)
    server = HttpServer(make_app(edge, engine, lambda: "x 1\n"), listen())
    await server.start()
    grpc_server, address = await start_server(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), server)
    )
    async with (
        openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0, timeout=60.0) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        try:
            yield client, generation_pb2_grpc.GenerationServiceStub(channel)
        finally:
            await grpc_server.stop(0.5)
            await server.stop(0.0)


async def assert_full(client: openai.AsyncOpenAI, stub: Any, first_s: int) -> None:
    """Three refusals in a row are sent to the places that come free after `first_s`, + 1 and + 2 seconds."""
    with pytest.raises(openai.RateLimitError, match="max_queue_len is 1; retry in") as full:
        await client.completions.create(model="tiny", **LONG)
    assert full.value.status_code == 429
    assert full.value.response.headers["retry-after"] == str(first_s)
    stream = client.completions.create(model="tiny", stream=True, **LONG)
    with pytest.raises(openai.RateLimitError) as full:
        await stream
    assert full.value.response.headers["retry-after"] == str(first_s + 1)
    call = stub.Generate(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3])))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = await rpc_status.aio.from_call(call)
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(retry)
    assert first_s + 1 < retry.retry_delay.ToMilliseconds() / 1000 <= first_s + 2


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The engine's: how long its queue has been full is part of when to come again."""
    now_s = time.monotonic()
    monkeypatch.setattr(engine_thread, "monotonic", lambda: now_s)
    return lambda: now_s


def test_a_worker_says_when_to_come_again(tokenizer: Tokenizer, standing_clock: Callable[[], float]) -> None:
    async def check() -> None:
        worker = Worker(tokenizer.vocab_size, LONG_STEP_S, clock=standing_clock)
        async with edge_over(worker.local, tokenizer) as (client, stub):
            tasks = await worker.fill(client)
            await assert_full(client, stub, 1)
            worker.step_s = 0.0
            for answer in await asyncio.gather(*tasks):
                assert answer.usage.completion_tokens == 40  # those in the queue are not disturbed
        assert worker.thread.stop()

    run(check())


def test_a_router_passes_it_on(tokenizer: Tokenizer, standing_clock: Callable[[], float]) -> None:
    async def check() -> None:
        worker, router = (
            Worker(tokenizer.vocab_size, LONG_STEP_S, clock=standing_clock),
            await Router().start(),
        )
        fake = FakeWorker((router.address,), Role.UNIFIED, fingerprint="weights-1")
        fake.service = WorkerService(worker.local, FAST)
        await fake.start()
        await until(lambda: router.linked() == 1)
        async with edge_over(router.engine, tokenizer) as (client, stub):
            tasks = [asyncio.create_task(client.completions.create(model="demo", **LONG))]
            await until(lambda: worker.local.load.running == 1)
            tasks.append(asyncio.create_task(client.completions.create(model="demo", **LONG)))
            await until(lambda: worker.local.load.waiting == 1)
            with pytest.raises(openai.RateLimitError, match=r"max_queue_len is 1; retry in 1\.0 s") as full:
                await client.completions.create(model="demo", **LONG)
            assert full.value.response.headers["retry-after"] == "1"
            call = stub.Generate(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1])))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            status = await rpc_status.aio.from_call(call)
            retry = error_details_pb2.RetryInfo()
            assert status is not None
            assert status.details[0].Unpack(retry)
            assert 1.0 < retry.retry_delay.ToMilliseconds() / 1000 <= 2.0
            worker.step_s = 0.0
            await asyncio.gather(*tasks)
        await fake.die()
        await router.stop()
        assert worker.thread.stop()

    run(check())


def test_of_several_full_workers_the_soonest_time_is_passed_on() -> None:
    async def check() -> None:
        router = await Router().start()
        workers = [await FakeWorker((router.address,)).start() for _ in range(3)]
        for worker, seconds in zip(workers, (9.0, 2.5, 7.0), strict=True):
            worker.engine.refuse = Overloaded("full", retry_after_s=seconds)
        await until(lambda: router.linked() == 3)
        asked = EngineRequest(
            request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), deadline_s=time.monotonic() + 5, traceparent=TRACE
        )
        outputs = [output async for output in router.engine.generate(asked)]
        assert isinstance(outputs[-1].error, Overloaded)
        assert outputs[-1].error.retry_after_s == 2.5
        assert [worker.engine.seen[0].num_asked for worker in workers] == [3] * 3
        assert [worker.engine.seen[0].traceparent for worker in workers] == [TRACE] * 3  # on every attempt
        for worker in workers:
            await worker.die()
        await router.stop()

    run(check())


def test_what_a_router_refuses_leaves_nothing_to_the_garbage_collector(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        router = await Router().start()
        worker = await FakeWorker((router.address,)).start()
        worker.engine.refuse = Overloaded("full")
        await until(lambda: router.linked() == 1)
        async with edge_over(router.engine, tokenizer) as (_, stub):
            gc.collect()
            gc.disable()
            earlier = living(Flight, Job)  # what tests before this one hold
            try:
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError, match="full"):
                        await stub.Generate(generation_pb2.GenerateRequest(text="the quick")).read()
                await until(lambda: len(living(Flight, Job)) <= len(earlier))  # the last call may still be about to end
            finally:
                gc.enable()
        await worker.die()
        await router.stop()

    run(check())


def test_details_of_an_internal_rpc_come_back_as_the_same_error() -> None:
    class Refusing(fleet_pb2_grpc.FleetServiceServicer):
        error: Any = Overloaded("full", retry_after_s=7.25)

        async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
            refuse(context, self.error)

    async def check() -> None:
        service = Refusing()
        server, address = await start_server(lambda s: fleet_pb2_grpc.add_FleetServiceServicer_to_server(service, s))
        async with grpc.aio.insecure_channel(address) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)

            async def failure() -> Any:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.List(fleet_pb2.ListRequest())
                return error_from_rpc(caught.value, "the fleet")

            error = await failure()
            assert isinstance(error, Overloaded)
            assert error.retry_after_s == 7.25
            service.error = InvalidRequest("top_p is 7", field="top_p")
            assert isinstance(await failure(), InvalidRequest)
        await server.stop(0)

    run(check())


@pytest.mark.covers("V39")
def test_the_trace_context_of_http_and_grpc_calls_reaches_the_engine(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        async with serving(engine, tokenizer) as served:
            for value in (TRACE, "nonsense"):
                headers = {"traceparent": value}
                await served.client.completions.create(model="tiny", prompt="the", n=2, extra_headers=headers)
                messages = [{"role": "user", "content": "the"}]
                await served.client.chat.completions.create(model="tiny", messages=messages, extra_headers=headers)  # type: ignore[arg-type]
                call = served.stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=(("traceparent", value),))
                _ = [message async for message in call]
            carried = [asked.traceparent for asked in engine.requests]
        assert carried == [TRACE] * 4 + [""] * 4

    run(check())


def test_a_request_that_outlasts_its_workers_drain_is_told_to_go_elsewhere(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        worker = Worker(tokenizer.vocab_size, LONG_STEP_S)
        async with edge_over(worker.local, tokenizer) as (client, stub):
            whole = asyncio.create_task(client.completions.create(model="tiny", **LONG))
            await until(lambda: worker.local.load.running == 1)
            call = stub.Generate(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3])))
            await until(lambda: worker.local.load.waiting == 1)
            assert await worker.local.drain(time.monotonic()) == 2
            worker.local.close()
            told = "this worker is shutting down; send the request again, to another worker"
            with pytest.raises(openai.InternalServerError, match=told) as ended:
                await whole
            assert ended.value.status_code == 503
            with pytest.raises(grpc.aio.AioRpcError, match=told):
                await call.read()
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
            worker.step_s = 0.0
            await until(lambda: not worker.thread.loop.num_unfinished)
        assert worker.thread.stop()

    run(check())
