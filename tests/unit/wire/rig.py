"""Real loopback gRPC around in-process fakes, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import fields, replace
from time import monotonic
from typing import Any

import grpc.aio
import pytest

from jdisagg.api import channels
from jdisagg.api.fleet import client as fleet_client
from jdisagg.api.peer import link as peer_link
from jdisagg.core.config import TransferConfig
from jdisagg.core.fleet import Member, ModelCard
from jdisagg.core.requests import EngineRequest, Role, SamplingParams
from jdisagg.handoff.identity import Backend, CacheGroup, Identity
from jdisagg.kv.spec import KVSpec
from tests.unit.ports import kept_port

FAST = TransferConfig(heartbeat_s=0.05, dead_after_s=0.5)  # shorter ones break when the machine is busy
IMPATIENT = replace(FAST, lease_s=1.0)  # a worker that is alone is evicted after a lease
PATIENCE = float(os.environ.get("JDISAGG_TEST_PATIENCE", "1"))  # less where a fault that makes requests hang is to be seen soon
RUN_LIMIT_S, WAIT_LIMIT_S = 120.0 * PATIENCE, 30.0 * PATIENCE  # only what hangs takes so long, on the busiest machine
LONGEST_TURN_S = 0.05
PATIENT = {"grpc.min_reconnect_backoff_ms": round(WAIT_LIMIT_S * 1000)}
_servers: list[grpc.aio.Server] = []
_ports = ExitStack()  # of them: nobody else gets one before the test has ended


def run_quiet(body: Coroutine[Any, Any, None], limit_s: float = RUN_LIMIT_S, *, patient: bool = True) -> None:
    """Run `body` and assert that no task and no thread outlives it. `patient`: connections, Hellos and heartbeats
    to routers have more than their second, which a machine may stand still for."""

    async def main() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await body
        finally:
            for server in _servers:  # those a failing test left: they would break the tests after it
                await server.stop(0)
            _servers.clear()
            _ports.close()
        await asyncio.sleep(0.05)
        mine, left = {asyncio.current_task()}, lambda: f"left: {asyncio.all_tasks()}"
        assert await until(lambda: asyncio.all_tasks() <= mine, 10.0, left) < 0.5, left()

    before = {thread for thread in threading.enumerate() if not thread.daemon}
    with pytest.MonkeyPatch.context() as patch:
        if patient:
            patch.setattr(channels, "_CHANNEL_OPTIONS", tuple((dict(channels._CHANNEL_OPTIONS) | PATIENT).items()))
            patch.setattr(peer_link, "HELLO_TIMEOUT_S", WAIT_LIMIT_S)
            patch.setattr(fleet_client, "RPC_TIMEOUT_S", WAIT_LIMIT_S)
        asyncio.run(main(), debug=False)
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= before


async def until(
    condition: Callable[[], object],
    limit_s: float = WAIT_LIMIT_S,
    what: Callable[[], str] = lambda: "condition did not come true in time",
) -> float:
    """Wait until `condition()` is true; returns the seconds it took, of which no turn of the loop counts for more than
    LONGEST_TURN_S: a machine that stands still for seconds is nobody's slowness. Looks once more when the time is over."""
    began_s, took_s, is_over = monotonic(), 0.0, False
    while not condition():
        assert not is_over, what()
        took_s += await pause(0.005)
        is_over = monotonic() - began_s > limit_s
    return took_s


async def pause(seconds: float) -> float:
    """Sleep; returns how long, at most LONGEST_TURN_S."""
    began_s = monotonic()
    await asyncio.sleep(seconds)
    return min(monotonic() - began_s, LONGEST_TURN_S)


def narrow_channel(address: str) -> grpc.aio.Channel:
    """To a server that soon waits for whoever reads nothing: gRPC's own window grows with what it measures, to tens of MB."""
    return grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)])


async def start_server(
    add: Callable[[grpc.aio.Server], object], port: int = 0, *, host: str = "127.0.0.1"
) -> tuple[grpc.aio.Server, str]:
    server = channels.make_server()
    add(server)
    address = channels.bind(server, host, port or _ports.enter_context(kept_port(host)))
    await server.start()
    _servers.append(server)
    return server, address


def identity(**changes: Any) -> Identity:
    spec = KVSpec(num_layers=2, num_kv_heads=2, features=8, dtype="float32")
    described: dict[str, Any] = {
        "fingerprint": "weights-1",
        "worker": "pid 1 @ here",
        "epoch": "epoch-1",
        "groups": (CacheGroup(spec=spec, page_size=16),),
        "backends": (Backend(name="grpc"),),
    }
    return Identity(**(described | changes))


_CARD = ModelCard(name="m", max_model_len=1000, vocab_size=1000, fingerprint="f")
_MEMBER = Member(role=Role.DECODE, address="h:1", worker="d", epoch="e", card=_CARD)


def member(like: Member = _MEMBER, **changes: Any) -> Member:
    """`like`, but for these; what its card says is changed by its names there."""
    names = {field.name for field in fields(ModelCard)} & set(changes)
    card = replace(like.card, **{name: changes.pop(name) for name in names})
    return replace(like, card=card, **changes)


def request(
    request_id: str = "r", *, left_s: float = 20.0, prompt: tuple[int, ...] = (1, 2, 3), **others: Any
) -> EngineRequest:
    sampling = others.pop("sampling", SamplingParams(max_tokens=8))
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling, deadline_s=monotonic() + left_s, **others
    )
