"""D's half of backend "tcp": reads over connections that are kept."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass
from time import monotonic

from jdisagg.core.errors import NeverConnected, Stalled
from jdisagg.core.host_names import NO_WAY, Address, Names
from jdisagg.transfer.tcp_wire import REPLY, REQUEST, UNKNOWN, Locator, hang_up, left_s, receive_into

PART_BYTES = 2**18  # stays in the cache until the reader has seen it
CONNECT_TIMEOUT_S = 2.0
SOONER_S = 0.01  # a wait that ended so much before its time did not end by that
STALL_TIMEOUT_S = 2.0  # without a byte: P serves every connection on a thread of its own, so nothing is worth waiting for


@dataclass(slots=True, eq=False)
class _Connection:
    """D's end of a connection."""

    address: tuple[str, int]
    socket: socket.socket


@dataclass(slots=True, eq=False)
class _Reading:
    """One read: its connection, once it has one."""

    peer: str
    connection: _Connection | None = None


class TcpSource:
    """A ByteSource over connections that are kept, one for each read at a time. `read_into` may be called from any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}  # by peer
        self._readings: set[_Reading] = set()
        self._names = Names()
        self._closed = False

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Generator[int, None, None]:
        """Fill `room` with the bytes at the locator `key`; see ByteSource."""
        locator = Locator.parse(key)
        reading = _Reading(peer)
        with self._lock:
            if self._closed:
                raise ConnectionError("the source is closed")
            self._readings.add(reading)
        try:
            connection, size = self._ask(reading, locator, deadline_s)
            if size > len(room):
                raise BufferError(f"piece {locator.number} of {peer} has {size} bytes, not {len(room)}")
            filled = 0
            while filled < size:
                connection.socket.settimeout(min(STALL_TIMEOUT_S, left_s(deadline_s)))
                count = connection.socket.recv_into(room[filled : min(size, filled + PART_BYTES)])
                if count == 0:
                    raise ConnectionError(f"{peer} hung up {size - filled} bytes before the end")
                filled += count
                yield count
            self._keep(reading)
            if size == UNKNOWN:
                raise KeyError(f"piece {locator.number} of {peer}: acknowledged, or its lease is over")
        except TimeoutError as error:
            kind = Stalled if monotonic() < deadline_s - SOONER_S else TimeoutError
            raise kind(f"piece {locator.number} of {peer}: {error}") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(f"piece {locator.number} of {peer}: {error}") from error
        finally:
            self._give_up(reading)
            with self._lock:
                self._readings.discard(reading)

    def drop(self, peer: str) -> None:
        """Nothing was read from the peer for a while, or it does not answer: close what is kept. Any thread."""
        with self._lock:
            kept = self._idle.pop(peer, [])
        for connection in kept:
            connection.socket.close()

    def close(self) -> None:
        """Close every connection; reads in progress end with ConnectionError."""
        with self._lock:
            self._closed = True
            kept, self._idle = [connection for idle in self._idle.values() for connection in idle], {}
            for reading in self._readings:
                if reading.connection is not None:
                    hang_up(reading.connection.socket)  # its reader closes it
        for connection in kept:
            connection.socket.close()

    # --- connections

    def _ask(self, reading: _Reading, locator: Locator, deadline_s: float) -> tuple[_Connection, int]:
        """A connection on which the piece's bytes come, and how many. A kept one on which P does not answer is replaced. A new
        one that P ends without a word is as good as none: its port is full, and other backends may do."""
        while True:
            connection = self._take_kept(reading, locator)
            is_fresh = connection is None
            if connection is None:
                found = self._names.addresses(locator.host, deadline_s)
                connection = self._enter(reading, _connect(locator, found, deadline_s))
            reply, why = bytearray(REPLY.size), "hung up"  # no exception: it would hold this frame, which would hold it
            kind: type[ConnectionError] = NeverConnected
            answer_by_s = min(deadline_s, monotonic() + STALL_TIMEOUT_S)
            try:
                connection.socket.settimeout(left_s(answer_by_s))
                connection.socket.sendall(REQUEST.pack(locator.secret, locator.number))
                if receive_into(connection.socket, memoryview(reply), answer_by_s) == REPLY.size:
                    (num_bytes,) = REPLY.unpack(reply)
                    if num_bytes >= UNKNOWN:
                        return connection, num_bytes
                    why, kind, is_fresh = "speaks another protocol", ConnectionError, True
            except TimeoutError:
                if is_fresh or answer_by_s == deadline_s:
                    raise
                why = "does not answer"
                self.drop(reading.peer)  # so may the others
            except OSError as broken:
                why = f"does not answer: {broken}"
            self._give_up(reading)
            if is_fresh or self._closed:
                raise (ConnectionError if self._closed else kind)(f"{reading.peer} {why}")

    def _take_kept(self, reading: _Reading, locator: Locator) -> _Connection | None:
        with self._lock:
            kept = self._idle.get(reading.peer, [])
            while kept:
                connection = kept.pop()
                if connection.address == (locator.host, locator.port):
                    reading.connection = connection
                    return connection
                connection.socket.close()  # the peer was started again
        return None

    def _enter(self, reading: _Reading, connection: _Connection) -> _Connection:
        """A new connection is the reading's from now on."""
        with self._lock:
            if not self._closed:
                reading.connection = connection
                return connection
        connection.socket.close()
        raise ConnectionError("the source is closed")

    def _keep(self, reading: _Reading) -> None:
        """The read is over and nothing is left on its connection."""
        with self._lock:
            if reading.connection is not None and not self._closed:
                self._idle.setdefault(reading.peer, []).append(reading.connection)
                reading.connection = None

    def _give_up(self, reading: _Reading) -> None:
        with self._lock:
            connection, reading.connection = reading.connection, None
        if connection is not None:
            connection.socket.close()


def _connect(locator: Locator, found: list[Address], deadline_s: float) -> _Connection:
    """Raises TimeoutError at the deadline, NeverConnected when nobody accepts at any of the addresses, ConnectionError when
    there is none, or this machine has no connection left."""
    why, kind = "no address", ConnectionError
    for address in found:
        try:
            connection = socket.socket(address.family, socket.SOCK_STREAM)
        except OSError as error:  # a kernel without this family
            why = str(error)
            continue
        try:
            connection.settimeout(min(CONNECT_TIMEOUT_S, left_s(deadline_s)))
            connection.connect(address.at(locator.port).sockaddr)
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError("reached nobody but itself")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _Connection((locator.host, locator.port), connection)
        except OSError as error:
            connection.close()
            why = str(error)
            if isinstance(error, TimeoutError) or error.errno in NO_WAY:
                kind = NeverConnected
    left_s(deadline_s)
    raise kind(f"{locator.host}:{locator.port}: {why}")
