"""A gRPC call that its deadline ends counts as one, on the worker and on the router before it; a cancelled one does not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.api.worker.service import WorkerService
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import run
from tests.unit.api_edge.test_overload import Worker, edge_over
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import FAST, until

TIMES = 3
LONG = generation_pb2.GenerateRequest(
    token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]), sampling=common_pb2.SamplingParams(max_tokens=40, ignore_eos=True)
)


def ends(metrics: Metrics) -> dict[str, float]:
    samples = [sample for family in metrics.requests.finished.collect() for sample in family.samples if sample.value]
    return {sample.labels["reason"]: sample.value for sample in samples}


async def let_them_end(stub: Any) -> None:
    """`TIMES` calls end at their deadline, then one is cancelled."""
    for _ in range(TIMES):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(LONG, timeout=1.0):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    call = stub.Generate(LONG, timeout=30.0)
    await call.read()
    call.cancel()


@pytest.mark.parametrize("through_a_router", [False, True])
def test_a_deadline_over_grpc_counts_as_one(through_a_router: bool, tokenizer: Tokenizer) -> None:
    wanted = {"deadline": float(TIMES), "abort": 1.0}

    async def asked_directly(worker: Worker) -> None:
        async with edge_over(worker.local, tokenizer) as (_, stub):
            await let_them_end(stub)
            await until(lambda: sum(ends(worker.engine.metrics).values()) == TIMES + 1)

    async def asked_through_a_router(worker: Worker) -> None:
        router = await Router().start()
        fake = FakeWorker((router.address,), Role.UNIFIED)
        fake.service = WorkerService(worker.local, FAST)
        await fake.start()
        await until(lambda: router.linked() == 1)
        async with edge_over(router.engine, tokenizer) as (_, stub):
            await let_them_end(stub)
            await until(lambda: sum(ends(worker.engine.metrics).values()) == TIMES + 1)
        assert ends(router.metrics) == wanted
        await fake.die()
        await router.stop()

    async def check() -> None:
        worker = Worker(tokenizer.vocab_size, 0.1)
        await (asked_through_a_router if through_a_router else asked_directly)(worker)
        assert ends(worker.engine.metrics) == wanted
        assert await asyncio.to_thread(worker.thread.stop)

    run(check())
