"""The other process of the hazards: offers arrays on a transfer server, led through a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from bench_kit.child import Child, child

from gpu_kit.findings import Clock
from jdisagg.transfer.jax_server import TransferServer

HOST = "127.0.0.1"
START_S, ANSWER_S = 60.0, 60.0


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


@dataclass(frozen=True)
class Peer:
    """Our end."""

    process: Child
    address: str
    clock: Clock

    def offer(self, seed: int, shape: tuple[int, ...], dtype: str) -> int:
        """The uuid under which `values` of these can be pulled once."""
        return self.process.ask(("offer", seed, shape, dtype), self.clock.at_most(ANSWER_S))

    def withdraw(self, uuid: int) -> None:
        """Free an offered array."""
        self.process.ask(("withdraw", uuid), self.clock.at_most(ANSWER_S))


@contextmanager
def peer(clock: Clock) -> Iterator[Peer]:
    """A process that offers arrays; killed at the end."""
    with child(serve, start_s=clock.at_most(START_S)) as (process, address):
        yield Peer(process, address, clock)
