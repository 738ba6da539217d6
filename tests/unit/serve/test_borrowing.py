"""What a prefill worker that fetches KV from decode workers keeps of them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest

from jdisagg.api.channels import INSECURE
from jdisagg.core.config import Config, TransferConfig
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.kv.spec import KVSpec
from jdisagg.roles.inbox import Inbox
from jdisagg.serve import build
from jdisagg.serve.engine_core import Core
from jdisagg.transfer import lanes
from jdisagg.transfer.target import PieceTarget
from tests.unit.waiting import until

SPEC = KVSpec(num_layers=1, num_kv_heads=1, features=1, dtype="float32")
READY = ChunkReady(key="k", begin=0, end=1, shape=(1, 1, 1, 1), dtype="float32", num_bytes=4, checksum=0)


def test_decode_workers_that_come_back_elsewhere_leave_no_channel_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    dropped, inbox = list[str](), Inbox()
    monkeypatch.setattr(build.GrpcByteSource, "read_into", lambda *_: iter(()))  # a peer that has nothing
    monkeypatch.setattr(build.GrpcByteSource, "drop", lambda self, peer: dropped.append(peer))
    target = PieceTarget.of(SPEC, jnp.zeros(1).sharding, 4)
    core = SimpleNamespace(config=Config(role="prefill"), piece_target=target, inbox=inbox)
    deployment = SimpleNamespace(core=core, closers=[])
    fetcher = build._borrowed(cast(Any, deployment), INSECURE)
    for serial in range(3):
        fetcher.fetch(HandoffId("a", serial), f"restarted:{serial}", READY, time.monotonic() + 60.0)
        assert inbox.drain(30.0)
    until(lambda: {"restarted:0", "restarted:1", "restarted:2"} <= set(dropped), "each peer that was read from is dropped")
    for close in deployment.closers:
        close()


@pytest.mark.parametrize(("buffer_bytes", "most"), [(1, 4), (16 * 3, 4), (16 * 4, 5), (16 * 10 + 1, 12)])
def test_four_pieces_arrive_or_as_many_as_fill_the_buffer_of_an_engine_as_whole_chunks_and_one_more(
    buffer_bytes: int, most: int
) -> None:
    config = Config(transfer=TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=buffer_bytes))
    runner = SimpleNamespace(device=SimpleNamespace(piece_sharding=jnp.zeros(1).sharding), chunk_tokens=4)
    core = SimpleNamespace(config=config, kv_spec=SPEC, runner=runner)
    room = cast(Any, Core.piece_target).func(core).room
    taken = [room.take(4) for _ in range(most)]
    assert None not in taken
    assert room.take(1) is None
