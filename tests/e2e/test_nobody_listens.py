"""Clients that go away in every way and at every moment, from requests that would go on for a long time: nobody works for them.

A cancellation that is lost does no harm that an answer would show: the request ends some time, its pages come back. So these
ask for thousands of tokens and go away early, many of them about when something arrives.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from chaos_kit.leaks import live_requests

from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.client import OPTIONS
from tests.e2e.conftest import Start
from tests.e2e.processes import ServerProcess, wait_until
from tests.e2e.tiny_model import make_tiny_model

MAX_TOKENS = 3500  # some 10 s
ROUNDS, VISITS, AT_ONCE = 5, 40, 4
ROUND_S, FREE_WITHIN_S = 60.0, 10.0  # two seconds, and less than one; a machine may stand still
STALL_S = "0.25"  # a bucket
WASTED_TOKENS = 1000  # decoded in a round for those who have left: each of the last ones goes on for a step or two
Way = Callable[[ServerProcess, int, random.Random], Awaitable[None]]


def asked(number: int, rng: random.Random) -> generation_pb2.GenerateRequest:
    prompt = [rng.randrange(16, 1024) for _ in range(rng.choice((1, 20, 90)))]
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True)
    return generation_pb2.GenerateRequest(
        request_id=f"leaves-{number}", token_ids=generation_pb2.TokenIds(ids=prompt), sampling=sampling
    )


async def until_it_is_time(call: grpc.aio.UnaryStreamCall, rng: random.Random) -> None:
    """After a few arrivals, in the moment of the last or between two, or after a while."""
    if rng.random() < 0.3:
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.1)) * rng.random())
        return
    for _ in range(rng.randrange(1, 30)):
        assert await call.read() is not grpc.aio.EOF
    await asyncio.sleep(0.01 * rng.random())


async def cancels(server: ServerProcess, number: int, rng: random.Random) -> None:
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked(number, rng), timeout=30)
        await until_it_is_time(call, rng)
        call.cancel()


async def aborts(server: ServerProcess, number: int, rng: random.Random) -> None:
    async with grpc.aio.insecure_channel(server.grpc, options=OPTIONS) as channel:
        stub, request = generation_pb2_grpc.GenerationServiceStub(channel), asked(number, rng)
        call = stub.Generate(request, timeout=30)
        assert await call.read() is not grpc.aio.EOF  # an abort that overtakes its request ends nothing
        await until_it_is_time(call, rng)
        await stub.Abort(generation_pb2.AbortRequest(request_id=request.request_id), timeout=10)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass


async def disconnects(server: ServerProcess, number: int, rng: random.Random) -> None:
    channel = grpc.aio.insecure_channel(server.grpc, options=OPTIONS)
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked(number, rng), timeout=30)
    with suppress(grpc.aio.UsageError):
        await until_it_is_time(call, rng)
    await channel.close()


async def leaves_http(server: ServerProcess, number: int, rng: random.Random) -> None:
    request = asked(number, rng)
    body = {"prompt": list(request.token_ids.ids), "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": rng.random() < 0.7}
    async with httpx.AsyncClient(trust_env=False, timeout=rng.choice((0.05, 0.5)) * rng.random()) as client:
        with suppress(httpx.TimeoutException):
            async with client.stream("POST", f"{server.http}/v1/completions", json=body) as response:
                lines = rng.randrange(1, 30)
                async for _ in response.aiter_lines():
                    if (lines := lines - 1) < 0:
                        break


WAYS: tuple[Way, ...] = (cancels, aborts, disconnects, leaves_http)


def working_for(server: ServerProcess) -> list[str]:
    return [f"{server.flags[1]}: {name}: {str(part)[:300]}" for name, part in live_requests(server.state()).items()]


def num_stalls(fleet: list[ServerProcess]) -> float:
    """Looks of event loops that came more than STALL_S late: who waits for a core passes nothing on."""
    late, in_time = "jdisagg_event_loop_late_seconds_count", "jdisagg_event_loop_late_seconds_bucket"
    return sum(server.metric(late) - server.metric(in_time, le=STALL_S) for server in fleet)


@pytest.mark.timeout(600)
def test_no_worker_goes_on_for_a_client_that_left(start: Start, exact_flags: tuple[str, ...], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "long", max_model_len=4096)
    flags = ("--model", str(model), *exact_flags[2:], "--max-model-len", "4096", "--num-pages", "2600")
    router = start("router", "--role", "router", "--model", str(model)).wait_ready()
    prefill, decode = (start(role, "--role", role, "--router", router.grpc, *flags) for role in ("prefill", "decode"))
    fleet = [router, prefill.wait_ready(), decode.wait_ready()]
    wait_until(lambda: len(router.state()["members"]) == 2, 30, "all workers have come")

    async def one(number: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            rng = random.Random(number)
            await WAYS[number % len(WAYS)](rng.choice((router, decode)), number, rng)

    async def everybody(numbers: range) -> None:
        limit = asyncio.Semaphore(AT_ONCE)
        async with asyncio.timeout(ROUND_S):  # who waits longer waits for a slot that is decoding for nobody
            await asyncio.gather(*(one(number, limit) for number in numbers))

    wasteful = 0  # rounds
    for first in range(0, ROUNDS * VISITS, VISITS):
        stalls, began_s = num_stalls(fleet), time.monotonic()
        asyncio.run(everybody(range(first, first + VISITS)))
        left_s, delivered = time.monotonic(), decode.metric("jdisagg_generated_tokens_total")
        while found := [text for server in fleet for text in working_for(server)]:
            assert time.monotonic() < left_s + FREE_WITHIN_S, found
            time.sleep(0.05)
        took_s, free_s = left_s - began_s, time.monotonic() - left_s
        wasted = decode.metric("jdisagg_generated_tokens_total") - delivered
        print(f"\n{VISITS} clients came and left in {took_s:.1f} s; nothing was held {free_s:.2f} s later, {wasted:.0f} tokens")
        wasteful += wasted >= WASTED_TOKENS
        assert wasted < WASTED_TOKENS or num_stalls(fleet) > stalls
        assert decode.metric("jdisagg_requests_finished_total", reason="length") == 0, "nobody waited for the end"
    assert wasteful < ROUNDS, "not all of them can have been held up"
    assert decode.metric("jdisagg_kv_pages_used") == 0
