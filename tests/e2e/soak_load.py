"""Clients that keep a small pool full for a while: all kinds of requests, over gRPC and HTTP, many of which go away early.

Requests are drawn from a catalogue, so that the tokens each of them should get have to be computed once only.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from multiprocessing import get_context

import grpc
import grpc.aio
import httpx

from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.client import OPTIONS, Asked, Got
from tests.e2e.processes import ServerProcess

CLIENTS = 24
END_LIMIT_S = 90.0  # of one request: a hang is a failure
PRIORITIES = 4
LEAVES = 0.15  # share of the clients that go away
FINISH = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


class Fate(Enum):
    """How a client's request goes on once it is sent."""

    STAYS = "stays"
    CANCELS = "cancels"  # the call is cancelled
    ABORTS = "aborts"  # another call ends it
    LEAVES = "leaves"  # its connection is closed
    HURRIES = "hurries"  # the deadline is short, maybe too short


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One request of one client."""

    entry: int  # of the catalogue
    asked: Asked
    fate: Fate
    after_s: float  # until it goes away
    over_http: bool


@dataclass(kw_only=True)
class Outcome:
    """What a visit got. `error`: text of the failure, None when it ended well."""

    visit: Visit
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    error: str | None = None
    went_away: bool = False
    seconds: float = 0.0


def make_catalogue(count: int, *, vocab_size: int, most_tokens: int, seed: int = 11) -> list[Asked]:
    """Prompts from one token to nearly `most_tokens`, some with shared beginnings, 1 to 8 choices, greedy and seeded."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(16, vocab_size) for _ in range(96)) for _ in range(4)]
    entries: list[Asked] = []
    for number in range(count):
        n = rng.randint(2, 8) if number % 5 == 1 else 1
        max_tokens = rng.choice((1, 2, 8, 24)) if n > 1 else rng.choice((1, 4, 16, 48, 96, 128))
        length = rng.randint(1, 80)
        if number % 12 == 7:
            length = most_tokens - max_tokens - rng.randrange(24)
        head = rng.choice(shared)[: rng.choice((32, 64, 96))] if number % 3 == 2 else ()
        prompt = (*head, *(rng.randrange(16, vocab_size) for _ in range(length)))[: most_tokens - max_tokens]
        sampling: dict[str, object] = {"max_tokens": max_tokens, "seed": rng.randrange(2**31), "ignore_eos": rng.random() < 0.7}
        sampling["temperature"] = rng.choice((0.0, 0.7, 1.0))
        if number % 7 == 3:
            sampling["stop_token_ids"] = [rng.randrange(16, vocab_size) for _ in range(6)]
        if number % 8 == 4:
            sampling |= {"top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5}
        entries.append(Asked(prompt=prompt, n=n, sampling=sampling))
    return entries


def flood(server: ServerProcess, catalogue: list[Asked], *, seed: int, seconds: float) -> list[Outcome]:
    """Load from a process of its own, whose end closes every connection: what the server then still has is the server's."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as clients:
        load = clients.submit(_flood_from_here, server.http, server.grpc, catalogue, seed, seconds)
        return load.result(seconds + 3 * END_LIMIT_S)


def _flood_from_here(http: str, grpc_address: str, catalogue: list[Asked], seed: int, seconds: float) -> list[Outcome]:
    crowd = Crowd(http, grpc_address, catalogue, seed)
    asyncio.run(asyncio.wait_for(crowd.flood(seconds), seconds + 2 * END_LIMIT_S))
    return crowd.outcomes


class Crowd:
    """Many clients of one server."""

    def __init__(self, http: str, grpc_address: str, catalogue: list[Asked], seed: int) -> None:
        self._http = http
        self._grpc = grpc_address
        self._catalogue = catalogue
        self._rng = random.Random(seed)
        self._count = 0
        self.outcomes: list[Outcome] = []

    async def flood(self, seconds: float) -> None:
        """Waves of requests, each until its last one has ended, for about so long."""
        end_s = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=CLIENTS)
        http = httpx.AsyncClient(base_url=self._http, limits=limits, timeout=END_LIMIT_S, trust_env=False)
        async with http, grpc.aio.insecure_channel(self._grpc, options=OPTIONS) as channel:
            while (now_s := time.monotonic()) < end_s:
                wave_end_s = min(end_s, now_s + self._rng.uniform(1.0, min(10.0, max(1.5, seconds / 4))))
                await asyncio.gather(*(self._client(http, channel, wave_end_s) for _ in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, channel: grpc.aio.Channel, end_s: float) -> None:
        while time.monotonic() < end_s:
            visit = self._next_visit()
            outcome = Outcome(visit=visit)
            began_s = time.monotonic()
            run = _over_http(http, outcome) if visit.over_http else self._over_grpc(channel, outcome)
            await asyncio.wait_for(run, END_LIMIT_S)
            outcome.seconds = time.monotonic() - began_s
            self.outcomes.append(outcome)
            await asyncio.sleep(self._rng.random() * 0.05)

    def _next_visit(self) -> Visit:
        rng, entry = self._rng, self._rng.randrange(len(self._catalogue))
        over_http = rng.random() < 0.4
        fate = Fate.STAYS
        if rng.random() < LEAVES:
            fate = Fate.LEAVES if over_http else rng.choice((Fate.CANCELS, Fate.ABORTS, Fate.LEAVES))
        elif not over_http and rng.random() < 0.1:
            fate = Fate.HURRIES
        after_s = rng.choice((0.0, 0.02, 0.1, 0.5, 2.0)) * rng.random()
        self._count += 1
        asked = replace(
            self._catalogue[entry],
            request_id=f"soak-{self._count}",
            priority=rng.randrange(PRIORITIES),
            deadline_s=0.02 + 2 * after_s if fate is Fate.HURRIES else END_LIMIT_S,
        )
        return Visit(entry=entry, asked=asked, fate=fate, after_s=after_s, over_http=over_http)

    async def _over_grpc(self, channel: grpc.aio.Channel, outcome: Outcome) -> None:
        if outcome.visit.fate is not Fate.LEAVES:
            await _call(channel, outcome)
            return
        async with grpc.aio.insecure_channel(self._grpc, options=OPTIONS) as own:
            task = asyncio.create_task(_call(own, outcome))
            await asyncio.wait({task}, timeout=outcome.visit.after_s)
            await own.close()
            await task


async def _call(channel: grpc.aio.Channel, outcome: Outcome) -> None:
    visit, got = outcome.visit, Got(tokens=outcome.tokens, finish=outcome.finish)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = stub.Generate(visit.asked.message(), timeout=visit.asked.deadline_s)
    task = asyncio.create_task(_read(call, got))
    try:
        if visit.fate in (Fate.CANCELS, Fate.ABORTS):
            await asyncio.wait({task}, timeout=visit.after_s)
            outcome.went_away = not task.done()
            if visit.fate is Fate.ABORTS:
                await stub.Abort(generation_pb2.AbortRequest(request_id=visit.asked.request_id), timeout=10)
            else:
                call.cancel()
        await task
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
        outcome.error = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        outcome.error = "CANCELLED"
    outcome.went_away |= visit.fate is Fate.LEAVES and outcome.error is not None
    if outcome.error is None and got.complete is None:
        outcome.error = "ended without a Complete message"


async def _read(call: grpc.aio.UnaryStreamCall, got: Got) -> None:
    async for response in call:
        if response.HasField("delta"):
            got.take(response.delta)
        else:
            got.complete = response.complete


async def _over_http(http: httpx.AsyncClient, outcome: Outcome) -> None:
    visit = outcome.visit
    body = {**visit.asked.sampling, "prompt": visit.asked.prompt, "n": visit.asked.n, "priority": visit.asked.priority}
    body |= {"stream": True, "return_token_ids": True}
    try:
        async with asyncio.timeout(visit.after_s if visit.fate is Fate.LEAVES else None):
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = f"HTTP {response.status_code}: {(await response.aread()).decode()}"
                    return
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        _take_event(event, outcome)
    except TimeoutError:
        outcome.went_away = True
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if not outcome.went_away and outcome.error is None and len(outcome.finish) != visit.asked.n:
        outcome.error = f"{len(outcome.finish)} of {visit.asked.n} choices have ended"


async def _events(response: httpx.Response) -> AsyncGenerator[dict]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _take_event(event: dict, outcome: Outcome) -> None:
    if "error" in event:
        outcome.error = str(event["error"])
    for choice in event.get("choices", ()):
        outcome.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        if choice["finish_reason"]:
            outcome.finish[choice["index"]] = FINISH[choice["finish_reason"]]
