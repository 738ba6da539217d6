"""`jdisagg.serve.worker` with the backend of JDISAGG_BROKEN_BACKEND (`fetch:NAME` or `publish:NAME`) broken, or as on a host of
its own (`other host`), with a port that nobody reaches (`other host, closed`).

What breaks is what would: shared memory that may not be opened or that is full, a transfer server that nobody reaches or
that refuses arrays.
"""

from __future__ import annotations

import os

from jdisagg.core.config import Config
from jdisagg.serve import backends, worker
from jdisagg.serve.process import Process
from jdisagg.transfer import jax_server, shm_backend, tcp_store
from jdisagg.transfer.target import PieceError

BROKEN = "JDISAGG_BROKEN_BACKEND"


def _refuse(error: Exception):
    def refuse(*_arguments: object, **_named: object) -> None:
        raise error

    return refuse


async def serve(config: Config, process: Process) -> int:
    match os.environ[BROKEN]:
        case "fetch:shm":
            shm_backend.ShmSource.read_into = _refuse(ConnectionError("permission denied"))
        case "publish:shm":
            shm_backend.Arena.put = _refuse(OSError("no space left on device"))
        case "fetch:jax":
            jax_server.TransferConnection.begin = _refuse(PieceError("connection", "nobody there"))
        case "publish:jax":
            jax_server.TransferServer.offer = _refuse(RuntimeError("the transfer server is gone"))
        case "other host":
            backends.same_host_token = lambda: str(os.getpid())
        case "other host, closed":
            backends.same_host_token = lambda: str(os.getpid())
            tcp_store.TcpStore.address = ("127.0.0.1", 1)
    return await worker.serve(config, process)
