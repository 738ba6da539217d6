"""D's half of backend "tcp": reads over connections that are kept."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from jdisagg.transfer.tcp_wire import (
    IDLE_TIMEOUT_S,
    REPLY,
    REQUEST,
    UNKNOWN,
    Locator,
    hang_up,
    receive_into,
    set_options,
)

PART_BYTES = 2**18  # stays in the cache until it is copied on
CONNECT_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class _Line:
    """D's end of a connection, and where its bytes are received."""

    address: tuple[str, int]
    socket: socket.socket
    is_fresh: bool = True
    kept_s: float = 0.0  # since when nobody uses it
    room: memoryview = field(default_factory=lambda: memoryview(bytearray(PART_BYTES)))


class TcpSource:
    """A ByteSource over connections that are kept, one for each read at a time. `read` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Line]] = {}  # by peer
        self._busy: dict[_Line, str] = {}  # peer
        self._closed = False

    def read(self, peer: str, key: str, deadline_s: float) -> Iterator[memoryview]:
        """Yield the bytes at the locator `key`, each part valid until the next; see ByteSource."""
        locator = Locator.parse(key)
        line = None
        try:
            line, left = self._ask(peer, locator, deadline_s)
            if left == UNKNOWN:
                self._keep(peer, line)
                line = None
                raise KeyError(f"piece {locator.number} of {peer}: acknowledged, or its lease is over")
            while left:
                line.socket.settimeout(_left_s(deadline_s))
                count = line.socket.recv_into(line.room[: min(left, PART_BYTES)])
                if count == 0:
                    raise ConnectionError(f"{peer} hung up {left} bytes before the end")
                yield line.room[:count]
                left -= count
            self._keep(peer, line)
            line = None
        except TimeoutError as error:
            raise TimeoutError(f"piece {locator.number} of {peer}: {error}") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(f"piece {locator.number} of {peer}: {error}") from error
        finally:
            if line is not None:
                self._forget(line)

    def drop(self, peer: str) -> None:
        """The peer has fallen silent: reads from it end with ConnectionError now, later ones connect anew. Any thread."""
        with self._lock:
            idle = self._idle.pop(peer, [])
            busy = [line for line, other in self._busy.items() if other == peer]
        for line in busy:  # its reader closes it
            hang_up(line.socket)
        for line in idle:
            line.socket.close()

    def close(self) -> None:
        """Close every connection; reads in progress fail."""
        with self._lock:
            self._closed = True
            peers = {*self._busy.values(), *self._idle}
        for peer in peers:
            self.drop(peer)

    # --- connections

    def _ask(self, peer: str, locator: Locator, deadline_s: float) -> tuple[_Line, int]:
        """A connection on which the piece's bytes come, and how many. A kept one that P has closed is replaced."""
        while True:
            line = self._take(peer, locator, deadline_s)
            reply = bytearray(REPLY.size)
            try:
                line.socket.settimeout(_left_s(deadline_s))
                line.socket.sendall(REQUEST.pack(locator.secret, locator.number))
                if receive_into(line.socket, memoryview(reply)) == REPLY.size:
                    return line, REPLY.unpack(reply)[0]
                error = ConnectionError(f"{peer} hung up")
            except TimeoutError:
                self._forget(line)
                raise
            except OSError as broken:
                error = ConnectionError(f"{peer}: {broken}")
            self._forget(line)
            if line.is_fresh:
                raise error

    def _take(self, peer: str, locator: Locator, deadline_s: float) -> _Line:
        address = (locator.host.strip("[]"), locator.port)
        with self._lock:
            if self._closed:
                raise ConnectionError("the source is closed")
            kept = self._idle.get(peer, [])
            while kept:
                line = kept.pop()
                if line.address == address:
                    line.is_fresh = False
                    self._busy[line] = peer
                    return line
                line.socket.close()  # the peer was started again
            self._close_unused(monotonic() - IDLE_TIMEOUT_S)
        timeout_s = min(CONNECT_TIMEOUT_S, _left_s(deadline_s))
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
        except TimeoutError as error:
            raise ConnectionError(f"{locator.host}:{locator.port} does not accept within {timeout_s:.1f} s") from error
        set_options(connection)
        line = _Line(address, connection)
        with self._lock:
            if self._closed:
                connection.close()
                raise ConnectionError("the source is closed")
            self._busy[line] = peer
        return line

    def _keep(self, peer: str, line: _Line) -> None:
        with self._lock:
            was_busy = self._busy.pop(line, None) is not None
            if was_busy and not self._closed:
                line.kept_s = monotonic()
                self._idle.setdefault(peer, []).append(line)
                return
        line.socket.close()

    def _close_unused(self, before_s: float) -> None:
        for peer, lines in list(self._idle.items()):
            for line in [line for line in lines if line.kept_s < before_s]:
                lines.remove(line)
                line.socket.close()
            if not lines:
                del self._idle[peer]

    def _forget(self, line: _Line) -> None:
        with self._lock:
            self._busy.pop(line, None)
        line.socket.close()


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline passed")
    return left_s
