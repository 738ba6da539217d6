"""P's half of backend "tcp": a port on which published pieces are served, and a thread for every connection, so that a D that
stands still holds up nobody else.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
from contextlib import suppress
from hmac import compare_digest
from time import sleep

from jdisagg.transfer.tcp_wire import (
    IDLE_TIMEOUT_S,
    REPLY,
    REQUEST,
    SECRET_BYTES,
    UNKNOWN,
    Locator,
    hang_up,
    receive_into,
    set_options,
)

log = logging.getLogger(__name__)

SEND_BYTES = 2**22  # between two looks at the clock
STALL_TIMEOUT_S = 10.0  # for a D that takes nothing
MAX_CONNECTIONS = 256
CLOSE_TIMEOUT_S = 2.0
PAUSE_S = 0.1  # when no descriptor is left


class TcpStore:
    """A ByteStore that serves its pieces on a port of its own."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`, an address that peers reach. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._numbers = itertools.count(1)
        self._by_key: dict[str, int] = {}  # from put to discard, as are the pieces
        self._pieces: dict[int, bytes | memoryview] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._thread.start()

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Serve the bytes; returns where they are."""
        number = self._by_key[key] = next(self._numbers)
        self._pieces[number] = data
        return str(Locator(self._host, self._port, self._secret, number))

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored. One on its way is sent to its end."""
        number = self._by_key.pop(key, None)
        if number is not None:
            self._pieces.pop(number, None)

    def close(self) -> None:
        """Free everything and hang up on everybody."""
        self._closed = True
        self._by_key.clear()
        self._pieces.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        connections = dict(self._connections)
        for connection in connections:
            hang_up(connection)
        for thread in (self._thread, *connections.values()):
            thread.join(CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError:  # closed, or no descriptors are left: try again
                if not self._closed:
                    sleep(PAUSE_S)
                continue
            if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                hang_up(connection)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection, peer), name=f"tcp-serve-{peer}", daemon=True)
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                set_options(connection)
                while self._answer(connection, peer):
                    pass
        except OSError as error:  # it went away, or stood still
            log.debug("tcp: connection from %s: %s", peer, error)
        finally:
            self._connections.pop(connection, None)

    def _answer(self, connection: socket.socket, peer: str) -> bool:
        connection.settimeout(IDLE_TIMEOUT_S)
        request = bytearray(REQUEST.size)
        if receive_into(connection, memoryview(request)) < REQUEST.size:
            return False
        secret, number = REQUEST.unpack(request)
        if not compare_digest(secret, self._secret):
            log.warning("tcp: %s asked for a piece of somebody else; hung up", peer)
            return False
        data = self._pieces.get(number)
        connection.settimeout(STALL_TIMEOUT_S)
        connection.sendall(REPLY.pack(UNKNOWN if data is None else len(data)))
        view = memoryview(data or b"")
        while view:
            view = view[connection.send(view[:SEND_BYTES]) :]
        return not self._closed
