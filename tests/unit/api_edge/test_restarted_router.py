"""A router that restarted is spoken to before its fleet has found it again: requests wait, as behind a fleet that was lost."""

from __future__ import annotations

import asyncio

from jdisagg.core.requests import SamplingParams as EngineSampling
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import run
from tests.unit.api_edge.test_overload import edge_over
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.wire.rig import request

MAX_TOKENS = 3


def test_requests_that_come_before_any_worker_are_served_by_the_first_one(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        router = await Router().start()
        async with edge_over(router.engine, tokenizer) as (client, stub):
            sampling = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]), sampling=sampling)
            over_grpc = asyncio.create_task(_last(stub, asked))
            over_http = asyncio.create_task(client.completions.create(model="demo", prompt=[1, 2, 3], max_tokens=MAX_TOKENS))
            await asyncio.sleep(0.1)
            assert not over_grpc.done()
            assert not over_http.done()
            worker = await FakeWorker((router.address,)).start()
            wanted = expected(request("r1", prompt=(1, 2, 3), sampling=EngineSampling(max_tokens=MAX_TOKENS)))
            assert list((await over_grpc).complete.choices[0].token_ids) == wanted
            answer = await over_http
            assert answer.usage is not None
            assert answer.usage.completion_tokens == MAX_TOKENS
        await worker.die()
        await router.stop()

    run(check())


async def _last(stub, asked: generation_pb2.GenerateRequest) -> generation_pb2.GenerateResponse:
    *_, last = [message async for message in stub.Generate(asked, timeout=10.0)]
    return last
