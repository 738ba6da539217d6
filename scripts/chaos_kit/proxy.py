"""A TCP forwarder in front of one worker, whose connections can be cut, held, swallowed, slowed down or delayed.

    D or router  ->  listener (the address the worker registers under)  ->  the worker's own port

What the worker sends in large parts is a transfer of KV; `on_transfer` hears of each part before it is passed on, so that a
fault can strike in the middle of one. KV that passes no forwarder is announced here: `on_transfer` hears of the announcement
once it is passed on, when the receiver begins to fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from jdisagg.v1 import peer_pb2

PART_BYTES = 2**14
DELAY_S = 0.05
TRANSFER_BYTES = 2**11  # a part at least this large carries KV: control messages are smaller


class Weather(Enum):
    """What the connections go through."""

    CLEAR = "clear"
    STALL = "stall"  # nothing passes, everything passes later
    BLACK_HOLE = "black_hole"  # nothing passes and never will, the connections stay open
    STARVE = "starve"  # words pass; a connection on which KV comes passes nothing any more: a path that loses large packets
    SLOW = "slow"  # a slow reader
    DELAY = "delay"  # every part comes later


@dataclass(eq=False)
class Connection:
    """One client of the worker."""

    client_port: int
    swallowed: bool = False  # in a black hole, for ever
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut(self) -> None:
        """Reset both halves."""
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """One listener on 127.0.0.1. Lives on one event loop."""

    def __init__(self, on_transfer: Callable[[Proxy, Connection], None], *, past: tuple[str, ...] = ()) -> None:
        """`past`: backends that move KV past the forwarder."""
        self.port = 0
        self.target_port: int | None = None  # None = the worker is not there: connections are refused
        self.bytes_from_worker = 0
        self.slow_bytes_per_s = 2**16  # a piece takes about three seconds
        self._on_transfer = on_transfer
        self._announcements = [peer_pb2.ChunkReady(backend=name).SerializeToString() for name in past]
        self._weather = Weather.CLEAR
        self._clear = asyncio.Event()
        self._clear.set()
        self._server: asyncio.Server | None = None
        self._connections: dict[Connection, asyncio.Task[None]] = {}

    async def start(self) -> Proxy:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PART_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Cut everything and stop listening."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections.values())
        self.cut()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection there is."""
        for connection in self._connections:
            connection.cut()

    def set_weather(self, weather: Weather) -> None:
        """From now on; connections that a black hole has swallowed stay so."""
        self._weather = weather
        if weather is Weather.STALL:
            self._clear.clear()
        else:
            self._clear.set()
        if weather is Weather.BLACK_HOLE:
            for connection in self._connections:
                connection.swallowed = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer.get_extra_info("peername")[1], self._weather is Weather.BLACK_HOLE, [writer])
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await self._join(connection, reader, writer)
        except (OSError, asyncio.CancelledError):  # a connection that ends in disorder is this class's trade
            connection.cut()
        finally:
            del self._connections[connection]

    async def _join(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target_port is None:
            connection.cut()
            return
        behind, ahead = await asyncio.open_connection("127.0.0.1", self.target_port, limit=PART_BYTES)
        connection.writers.append(ahead)
        pumps = [
            asyncio.create_task(self._pump(connection, reader, ahead, from_worker=False)),
            asyncio.create_task(self._pump(connection, behind, writer, from_worker=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            while connection.swallowed and self._weather is Weather.BLACK_HOLE:
                await asyncio.sleep(0.1)  # the other side is not told
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in connection.writers:
                with suppress(OSError):
                    one.close()

    async def _pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_worker: bool
    ) -> None:
        with suppress(OSError):
            while part := await reader.read(PART_BYTES):
                if from_worker:
                    self.bytes_from_worker += len(part)
                    if len(part) >= TRANSFER_BYTES:
                        self._on_transfer(self, connection)
                        connection.swallowed |= self._weather is Weather.STARVE
                await self._endure(len(part))
                if not connection.swallowed:
                    writer.write(part)
                    await writer.drain()
                    if from_worker and any(announcement in part for announcement in self._announcements):
                        self._on_transfer(self, connection)

    async def _endure(self, num_bytes: int) -> None:
        await self._clear.wait()
        if self._weather is Weather.SLOW:
            await asyncio.sleep(num_bytes / self.slow_bytes_per_s)
        elif self._weather is Weather.DELAY:
            await asyncio.sleep(DELAY_S)
