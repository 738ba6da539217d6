"""What hand-offs cost that wait for P to begin: the CPU time of both ends of their streams, which only beat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic, process_time
from typing import Any

from bench_kit.figures import table

from jdisagg.api.channels import bind, make_server
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.core.config import TransferConfig
from jdisagg.core.requests import EngineRequest, SamplingParams
from jdisagg.handoff.identity import OLDEST_PROTOCOL, PROTOCOL, Backend, CacheGroup, Identity
from jdisagg.handoff.messages import HandoffId, Open
from jdisagg.kv.spec import KVSpec

SPEC = KVSpec(num_layers=1, num_kv_heads=1, features=16, dtype="float32")
PATIENCE_S = 60.0


def measure(num_waiting: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """For each number of hand-offs the share of a core, with a heartbeat for all of them and, as an older peer wants it, with
    one for each."""
    return [
        {"waiting": number, **{name: asyncio.run(_share(number, protocol, seconds)) for name, protocol in KINDS.items()}}
        for number in num_waiting
    ]


KINDS = {"shared": PROTOCOL, "each": OLDEST_PROTOCOL}


async def _share(num_waiting: int, protocol: int, seconds: float) -> float:
    config, lost = TransferConfig(), list[object]()
    service = PeerServer(_identity("p", protocol), post=lambda event: None, pieces=None, config=config)
    server = make_server()
    add_peer_service(service, server)
    address = bind(server)
    await server.start()
    client = GrpcPeerClient(_identity("d", protocol), loop=asyncio.get_running_loop(), post=lost.append, config=config)
    try:
        for number in range(num_waiting):
            client.open(address, HandoffId(f"r{number}", 1), _open(f"r{number}"))
        async with asyncio.timeout(PATIENCE_S):
            while service.num_streams < num_waiting:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        began_s, used_s = monotonic(), process_time()
        await asyncio.sleep(seconds)
        share = (process_time() - used_s) / (monotonic() - began_s)
        if service.num_streams != num_waiting:
            raise RuntimeError(f"{num_waiting - service.num_streams} of {num_waiting} hand-offs ended")
        return share
    finally:
        await client.aclose()
        await server.stop(0)


def _identity(worker: str, protocol: int) -> Identity:
    return Identity(
        fingerprint="bench",
        worker=worker,
        epoch=worker,
        groups=(CacheGroup(spec=SPEC, page_size=16),),
        backends=(Backend(name="grpc"),),
        max_protocol=protocol,
    )


def _open(request_id: str) -> Open:
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(16)),
        sampling=SamplingParams(max_tokens=8),
        deadline_s=monotonic() + 600.0,
    )
    return Open(request=request, held_tokens=0, backend="grpc")


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table."""
    return table(
        "6. Hand-offs that wait for P: heartbeats, both ends, share of a core",
        ("waiting", "one for all", "one for each", "ratio"),
        [[str(row["waiting"]), *(f"{row[k]:.1%}" for k in KINDS), f"{row['each'] / row['shared']:.1f}"] for row in rows],
    )
