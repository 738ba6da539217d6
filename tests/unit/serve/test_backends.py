"""What a worker offers for each `--kv-transfer-backend`, what it says when it cannot, and where its ports are."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jdisagg.api.channels import INSECURE
from jdisagg.core.config import Config, ServerConfig, TransferConfig
from jdisagg.core.drill import Drill
from jdisagg.core.errors import NoMemory
from jdisagg.handoff.identity import Backend, Identity, agree
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.serve import backends
from jdisagg.serve.backends import DecodeBackends, PrefillBackends
from jdisagg.transfer import lanes
from jdisagg.transfer.drill import TransferDrill
from jdisagg.transfer.jax_backend import version
from jdisagg.transfer.target import PieceTarget
from tests.unit.waiting import until

DRILL = TransferDrill(Drill())


class Worker:
    """Builds backends as `build_deployment` does, and closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def prefill(self, choice: str, *, bind: str = "127.0.0.1", host: str = "") -> PrefillBackends:
        halves = PrefillBackends(core(choice, bind), host or bind, DRILL)
        self._stack.callback(halves.publishers.close)
        return halves

    def decode(self, choice: str) -> DecodeBackends:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = PieceTarget(
            sharding=sharding, dtype="float32", chunk_tokens=8, num_layers=1, num_kv_heads=1, features=4
        )  # fmt: skip
        halves = DecodeBackends(core(choice), target, "127.0.0.1", INSECURE, DRILL)
        for close in halves.closers:
            self._stack.callback(close)
        return halves


def core(choice: str, bind: str = "127.0.0.1") -> Any:
    """As much of a Core as backends look at."""
    config = Config(transfer=TransferConfig(kv_transfer_backend=choice), server=ServerConfig(host=bind))
    return SimpleNamespace(config=config, inbox=SimpleNamespace(post=queue.SimpleQueue().put))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with ExitStack() as stack:
        yield Worker(stack)


def names(offered: list[Backend]) -> tuple[str, ...]:
    return tuple(backend.name for backend in offered)


ORDERS = {"auto": ("shm", "tcp", "grpc"), "grpc": ("grpc",), "tcp": ("tcp", "grpc"), "shm": ("shm", "grpc")}


@pytest.mark.parametrize("choice", ORDERS)
def test_both_sides_offer_what_is_asked_for_in_order(worker: Worker, choice: str, caplog: pytest.LogCaptureFixture) -> None:
    p, d = worker.prefill(choice), worker.decode(choice)
    assert (names(p.offered), names(d.offered)) == (ORDERS[choice], ORDERS[choice])
    assert p.publishers.names == ORDERS[choice]
    assert d.fetcher.name == ORDERS[choice][0]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("theirs", "pairs"),
    [
        (version("cpu"), True),
        (version("gpu"), False),
        (version("tpu"), False),
        (f"{jax.__version__}, format 3", False),  # of before platforms were told
    ],
)
def test_kv_goes_from_device_to_device_between_like_ones_alone(worker: Worker, theirs: str, pairs: bool) -> None:
    offered = worker.decode("jax").offered
    peer = [replace(backend, version=theirs if backend.name == "jax" else backend.version) for backend in offered]
    for p, d in ((peer, offered), (offered, peer)):
        agreed = agree(identity(p), identity(d)).backends
        assert agreed == (("jax", "grpc") if pairs else ("grpc",))


def identity(offered: list[Backend]) -> Identity:
    """Of a worker that says so of its backends."""
    return Identity(fingerprint="f", worker="w", epoch="e", groups=(), backends=tuple(offered))


@pytest.mark.parametrize(
    ("bind", "host", "at"),
    [("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("127.0.0.1", "node-7", "node-7"), ("[::1]", "[::1]", "[::1]")],
)
def test_p_alone_says_where_its_port_is_and_only_tcp_has_one(worker: Worker, bind: str, host: str, at: str) -> None:
    of_p = {backend.name: backend.endpoint for backend in worker.prefill("auto", bind=bind, host=host).offered}
    said, _, port = str(of_p.pop("tcp")).rpartition(":")
    assert said == at
    socket.create_connection((bind.strip("[]"), int(port)), timeout=5).close()
    assert set(of_p.values()) == {None}
    assert {backend.endpoint for backend in worker.decode("auto").offered} == {None}


@pytest.mark.parametrize(("choice", "left"), [("auto", ("shm", "grpc")), ("tcp", ("grpc",))])
def test_a_port_that_cannot_be_bound_is_said_and_done_without(
    worker: Worker, choice: str, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(backends, "TcpStore", refuse)
    assert names(worker.prefill(choice).offered) == left
    assert caplog.messages == ["transfer backend tcp is not offered: [Errno 99] Cannot assign requested address"]


def test_a_backend_for_whose_pieces_no_memory_is_left_ends_the_start(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    monkeypatch.setattr(backends, "ShmStore", refuse)
    with pytest.raises(NoMemory, match=r"^--transfer-chunk-tokens: no memory is left for a piece of KV .* 5 bytes"):
        worker.prefill("auto")


@pytest.mark.parametrize(("choice", "backend"), [("grpc", "grpc"), ("auto", "grpc"), ("auto", "tcp"), ("tcp", "tcp")])
def test_prefill_workers_that_come_back_elsewhere_leave_no_connection_behind(
    worker: Worker, choice: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    dropped, source = list[str](), {"grpc": backends.GrpcByteSource, "tcp": backends.TcpSource}[backend]
    monkeypatch.setattr(source, "read_into", lambda *_: iter(()))  # a peer that has nothing
    monkeypatch.setattr(source, "drop", lambda self, peer: dropped.append(peer))
    fetcher = worker.decode(choice).fetcher
    ready = ChunkReady(
        key="k", begin=0, end=8, shape=(1, 8, 1, 4), dtype="float32", num_bytes=128, checksum=0, backend=backend
    )  # fmt: skip
    for serial in range(3):
        fetcher.fetch(HandoffId("a", serial), f"restarted:{serial}", ready, time.monotonic() + 60.0)
    until(lambda: len(dropped) >= 3)
    assert sorted(dropped) == ["restarted:0", "restarted:1", "restarted:2"]
