"""The yardsticks: bytes through a plain TCP socket between two processes, and a copy within one."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from time import perf_counter

import numpy as np

from transfer_bench.consumer import Moved
from transfer_bench.parts import HOST, cpu_s

SOCKET_BUFFER_BYTES = 2**20


def _send(piece_bytes: int, pipe: Connection) -> None:
    piece = memoryview(np.random.default_rng(0).integers(0, 255, piece_bytes, np.uint8).data)
    with socket.create_server((HOST, 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            while (num_pieces := pipe.recv()) is not None:
                before_s = cpu_s()
                for _ in range(num_pieces):
                    connection.sendall(piece)
                pipe.send(cpu_s() - before_s)


class RawTcp:
    """A sender in a process of its own; every piece is received into a fresh buffer."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_send, args=(piece_bytes, theirs), daemon=True)
        self._process.start()
        self._socket = socket.create_connection((HOST, self._pipe.recv()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def move(self, num_pieces: int) -> Moved:
        """Receive so many pieces."""
        before_s, began_s = cpu_s(), perf_counter()
        self._pipe.send(num_pieces)
        for _ in range(num_pieces):
            view = np.empty(self._piece_bytes, np.uint8).data
            while view:
                view = view[self._socket.recv_into(view) :]
        seconds, cpu_d_s = perf_counter() - began_s, cpu_s() - before_s
        return Moved(num_pieces * self._piece_bytes, seconds, self._pipe.recv(), cpu_d_s)

    def close(self) -> None:
        """End the sender."""
        self._pipe.send(None)
        self._socket.close()
        self._process.join(10)


def memcpy(piece_bytes: int, num_pieces: int) -> Moved:
    """Copy so many pieces into fresh buffers."""
    piece = np.random.default_rng(0).integers(0, 255, piece_bytes, np.uint8)
    before_s, began_s = cpu_s(), perf_counter()
    for _ in range(num_pieces):
        piece.copy()
    return Moved(num_pieces * piece_bytes, perf_counter() - began_s, 0.0, cpu_s() - before_s)
