"""The other process of the hazards: offers arrays on a transfer server, led through a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import jax
import numpy as np

from jdisagg.transfer.jax_server import TransferServer

HOST = "127.0.0.1"
START_S = 60.0
ANSWER_S = 20.0


def values(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What either side can make."""
    return np.random.default_rng(seed).integers(-100, 100, shape).astype(jax.numpy.dtype(dtype))


def serve(pipe: Connection) -> None:
    """The process's main: says its address; ("offer", seed, shape, dtype) -> uuid; ("withdraw", uuid) -> None."""
    server = TransferServer(jax.devices(), HOST)
    offered: dict[int, Any] = {}
    pipe.send(server.address)
    while True:
        match pipe.recv():
            case ("offer", seed, shape, dtype):
                array = jax.block_until_ready(jax.device_put(values(seed, shape, dtype), jax.devices()[0]))
                uuid = server.offer([array])
                offered[uuid] = array
                pipe.send(uuid)
            case ("withdraw", uuid):
                server.withdraw([offered.pop(uuid)])
                pipe.send(None)


class Peer:
    """Our end."""

    def __init__(self, process: SpawnProcess, pipe: Any) -> None:
        self.process = process
        self._pipe = pipe
        self.address = str(self._answer(START_S))

    def offer(self, seed: int, shape: tuple[int, ...], dtype: str) -> int:
        """The uuid under which `values` of these can be pulled once."""
        self._pipe.send(("offer", seed, shape, dtype))
        return int(self._answer(ANSWER_S))

    def withdraw(self, uuid: int) -> None:
        """Free an offered array."""
        self._pipe.send(("withdraw", uuid))
        self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"the other process did not answer within {timeout_s:g} s")
        return self._pipe.recv()


@contextmanager
def peer() -> Iterator[Peer]:
    """A process that offers arrays; killed at the end."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Peer(process, ours)
    finally:
        process.kill()
        process.join(10)
