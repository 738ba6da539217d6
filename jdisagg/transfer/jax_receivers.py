"""A transfer server for each receiver of a prefill worker."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from jdisagg.transfer.jax_server import TransferServer, TransferServers, Unsupported
from jdisagg.transfer.lanes import IDLE_S

MAX_SERVERS = 64  # of a worker: eight threads and ten descriptors each


class _Used(NamedTuple):
    server: TransferServer
    at_s: float  # for the last time


class ServerPerReceiver:
    """Who freezes in the middle of a transfer holds up nobody else. A receiver is a connection: one that comes back, be it the
    same process, may have left a server behind that waits for it."""

    def __init__(self, servers: TransferServers) -> None:
        self._all = servers
        self._by_receiver: dict[str, _Used] = {}  # longest unused first

    def of(self, receiver: str, *, busy: Sequence[TransferServer]) -> TransferServer:
        """The receiver's, started if there is none. Of those not in `busy` the idle end, and the longest unused beyond
        MAX_SERVERS. Raises Unsupported when all are busy."""
        known = self._by_receiver.pop(receiver, None)
        self.end_idle(busy=busy)
        if known is None:
            num_surplus = max(0, len(self._by_receiver) + 1 - MAX_SERVERS)
            self._end(self._free(busy)[:num_surplus])
            if len(self._by_receiver) >= MAX_SERVERS:
                raise Unsupported(f"{MAX_SERVERS} receivers have offers, and each has a transfer server of its own")
        server = self._all.start() if known is None else known.server
        self._by_receiver[receiver] = _Used(server, monotonic())
        return server

    def end_idle(self, *, busy: Sequence[TransferServer]) -> None:
        """End those that were not used for IDLE_S, but none in `busy`."""
        now_s = monotonic()
        self._end([receiver for receiver in self._free(busy) if now_s - self._by_receiver[receiver].at_s > IDLE_S])

    def _free(self, busy: Sequence[TransferServer]) -> list[str]:
        """Whose server has no offers; longest unused first."""
        return [receiver for receiver, used in self._by_receiver.items() if used.server not in busy]

    def _end(self, receivers: Sequence[str]) -> None:
        for receiver in receivers:
            del self._by_receiver[receiver]

    def clear(self) -> None:
        """End all."""
        self._by_receiver.clear()
