"""Routers and the workers that serve them, requests of every kind, and a load that goes on beside a test."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio
from fleet_process import free_port

from tests.e2e.client import OPTIONS, Asked, Got, generate
from tests.e2e.conftest import Start
from tests.e2e.processes import ServerProcess, wait_until

LIMIT_S = 30.0  # of what takes a second; the figures themselves are printed: machines differ
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": 1},
    {"temperature": 0.8, "logprobs": 3, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.01, "prompt_logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.2},
)


def numbered(name: str, count: int, max_tokens: int, seed: int = 1) -> list[Asked]:
    """Requests of every kind in turn; every eighth has three choices."""
    rng = random.Random(seed)
    return [
        Asked(
            prompt=tuple(rng.randrange(16, 1024) for _ in range(rng.choice((5, 20, 40)))),
            n=3 if number % 8 == 0 else 1,
            sampling={"max_tokens": max_tokens, "seed": rng.randrange(2**31), "ignore_eos": True, **KINDS[number % 4]},
            request_id=f"{name}-{number}",
        )
        for number in range(count)
    ]


@dataclass(kw_only=True)
class Fleet:
    """Routers and the workers that serve all of them; none is restarted by itself. `model`: flags of everybody, `flags`: of the
    workers."""

    start: Start
    model: tuple[str, ...]
    flags: tuple[str, ...]
    decode_flags: tuple[str, ...] = ("--local-prefill", "never")
    routers: list[ServerProcess] = field(default_factory=list)
    prefill: list[ServerProcess] = field(default_factory=list)
    decode: list[ServerProcess] = field(default_factory=list)

    def begin(self, *, num_routers: int) -> Fleet:
        """The routers, one prefill and two decode workers, ready and known to each other."""
        self.routers = [self.add_router() for _ in range(num_routers)]
        for role in ("prefill", "decode", "decode"):
            self.add(role)
        for worker in self.workers:
            worker.wait_ready()
        self.wait_members()
        return self

    @property
    def workers(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode]

    def add(self, role: str, *more: str) -> ServerProcess:
        """Start a worker; it is not ready yet. Of its flags, `more` win."""
        flags = ("--router", ",".join(router.grpc for router in self.routers), *self.model, *self.flags)
        mine = self.decode_flags if role == "decode" else ()
        server = self.start(role, "--role", role, *flags, *mine, *more)
        (self.prefill if role == "prefill" else self.decode).append(server)
        return server

    def add_router(self, grpc_port: int | None = None) -> ServerProcess:
        """Start a router and wait for it. Its port stays its own when it has died: workers ask for it there."""
        port = free_port() if grpc_port is None else grpc_port
        return self.start("router", "--role", "router", *self.model, "--grpc-port", str(port)).wait_ready()

    def replace(self, dead: ServerProcess) -> None:
        """Another decode worker."""
        self.decode.remove(dead)
        self.add("decode").wait_ready()
        self.wait_members()

    def wait_members(self, *routers: ServerProcess) -> float:
        """Until these routers (all, if none is named) see every worker, and nobody else; the seconds it took."""
        began_s = time.monotonic()
        for router in routers or self.routers:
            wait_until(lambda r=router: self._sees_all(r), LIMIT_S, "a router sees every worker", router.state)
        return time.monotonic() - began_s

    def _sees_all(self, router: ServerProcess) -> bool:
        linked = {member["address"]: member["linked"] for member in router.state()["members"]}
        return linked.keys() == {worker.grpc for worker in self.workers} and sum(linked.values()) == len(self.decode)


def num_known(router: ServerProcess) -> int:
    """Requests that the router knows its workers to have, whoever gave them to them."""
    return sum(member["running"] + member["waiting"] for member in router.state()["members"])


def num_whole(fleet: Fleet) -> float:
    """Requests that decode workers have served to their end."""
    return sum(worker.metric("jdisagg_requests_finished_total", reason="length") for worker in fleet.decode)


def wait_streaming(router: ServerProcess, count: int, streams: list[asyncio.Task[Got]]) -> None:
    """Until so many streams of this router have tokens, or as many of `streams`, its clients', have ended as leave fewer."""

    def enough() -> bool:
        left = sum(not stream.done() for stream in streams)
        return left < count or sum(bool(flight["delivered"]) for flight in router.state()["flights"]) >= count

    wait_until(enough, LIMIT_S, f"{count} streams have tokens", router.state)


def wait_forgotten(fleet: Fleet, request_ids: list[str]) -> None:
    """Until no worker holds anything of these requests."""
    for worker in fleet.workers:
        wait_until(lambda w=worker: not any(name in str(w.state()["streams"]) for name in request_ids), LIMIT_S, "forgotten")


class Load:
    """The same requests over and over, a few at a time, from a thread."""

    def __init__(self, address: str, requests: list[Asked], at_once: int) -> None:
        self.got: list[tuple[int, Got]] = []
        self._requests = requests
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(address, at_once)))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    async def _run(self, address: str, at_once: int) -> None:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            await asyncio.gather(*(self._stream(channel, first, at_once) for first in range(at_once)))

    async def _stream(self, channel: grpc.aio.Channel, number: int, step: int) -> None:
        while not self._stop.is_set():
            index = number % len(self._requests)
            asked = self._requests[index]
            named = Asked(prompt=asked.prompt, n=asked.n, sampling=asked.sampling, request_id=f"up-{number}", deadline_s=60.0)
            self.got.append((index, await generate(channel, named)))
            number += step
