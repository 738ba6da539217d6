"""P's half of backend "tcp": a port on which published pieces are served, and a thread for every connection, so that a D that
stands still holds up nobody else.

Who has not shown the secret yet is a stranger: when the port is full, the one that has been here longest makes room, so that
strangers cannot keep a D out.
"""

from __future__ import annotations

import itertools
import logging
import resource
import secrets
import socket
import threading
from contextlib import suppress
from hmac import compare_digest
from time import monotonic, sleep

from jdisagg.core.logs import Seldom
from jdisagg.transfer.tcp_wire import (
    REPLY,
    REQUEST,
    SECRET_BYTES,
    UNKNOWN,
    Locator,
    hang_up,
    left_s,
    receive_into,
)

log = logging.getLogger(__name__)

SEND_BYTES = 2**22  # between two looks at the clock
REQUEST_TIMEOUT_S = 2.0  # D asks as soon as it is connected
IDLE_TIMEOUT_S = 120.0  # behind a request; D hangs up long before
STALL_TIMEOUT_S = 10.0  # for a D that takes nothing; and it has to take, all in all ..
LEAST_BYTES_PER_S = 2**20
MAX_CONNECTIONS = 256
SHARE = 0.05  # of this process's descriptors at most: HTTP and gRPC keep 0.83 of them, and it has some of its own
CLOSE_TIMEOUT_S = 2.0
DISPLACE_TIMEOUT_S = 1.0  # its thread is blocked in recv and ends at once
SAID_EVERY_S = 10.0  # a line of the log about strangers, or a shortage
FULL = "tcp: all %d connections are taken; hung up on %s, which goes on over another backend"
PAUSE_S = 0.1  # when no descriptor or thread is left


class TcpStore:
    """A ByteStore that serves its pieces on a port of its own."""

    def __init__(self, bind_host: str, advertised_host: str = "") -> None:
        """Listen on a free port of `bind_host`; peers reach it as `advertised_host` ("" = the same). Raises OSError."""
        bind_host = bind_host.strip("[]")
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        both = bind_host == "::" and socket.has_dualstack_ipv6()  # as gRPC does
        self._listener = socket.create_server((bind_host, 0), family=family, dualstack_ipv6=both)
        self._host, self._port = (advertised_host or bind_host).strip("[]"), int(self._listener.getsockname()[1])
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._numbers = itertools.count(1)
        self._pieces: dict[int, bytes | memoryview] = {}
        self._by_key: dict[str, int] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # of these, oldest first
        self._lock = threading.Lock()  # of these two
        self._strangers_told = Seldom(SAID_EVERY_S)
        self._shortage_told = Seldom(SAID_EVERY_S)
        self._full_told = Seldom(SAID_EVERY_S)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where peers reach it."""
        return self._host, self._port

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Serve the bytes; returns where they are."""
        number = next(self._numbers)
        self._pieces[number] = data
        self._by_key[key] = number  # last: who finds the key frees the bytes, too
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
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            hang_up(connection)
        for thread in connections.values():
            thread.join(CLOSE_TIMEOUT_S)

    # --- threads

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError as error:
                if not self._closed:  # no descriptor is left: perhaps soon
                    self._shortage_told.say(log, logging.WARNING, "tcp: %s", error, now_s=monotonic())
                    sleep(PAUSE_S)
                continue
            if self._closed or not self._has_room():
                connection.close()  # D reads its pieces over another backend
                if not self._closed:
                    self._full_told.say(log, logging.WARNING, FULL, most_connections(), peer, now_s=monotonic())
                continue
            thread = threading.Thread(target=self._serve, args=(connection, peer), name=f"tcp-serve-{peer}", daemon=True)
            with self._lock:
                self._connections[connection] = thread
                self._strangers[connection] = None
            try:
                thread.start()
            except RuntimeError as error:
                self._shortage_told.say(log, logging.WARNING, "tcp: %s; hung up on %s", error, peer, now_s=monotonic())
                self._forget(connection)
                connection.close()
                sleep(PAUSE_S)

    def _has_room(self) -> bool:
        """For one more connection, perhaps where a stranger was."""
        with self._lock:
            if len(self._connections) < most_connections():
                return True
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            thread = self._connections[oldest]
        hang_up(oldest)
        thread.join(DISPLACE_TIMEOUT_S)
        return True

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wait_s = REQUEST_TIMEOUT_S
                while self._answer(connection, peer, wait_s):
                    wait_s = IDLE_TIMEOUT_S
        except OSError as error:  # it went away, or stood still
            log.debug("tcp: connection from %s: %s", peer, error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
            self._strangers.pop(connection, None)

    def _answer(self, connection: socket.socket, peer: str, wait_s: float) -> bool:
        """One request, the first byte of which may take `wait_s`; False to hang up."""
        room = memoryview(bytearray(REQUEST.size))
        if not receive_into(connection, room[:1], monotonic() + wait_s):
            return False
        if receive_into(connection, room[1:], monotonic() + REQUEST_TIMEOUT_S) < REQUEST.size - 1:
            return False
        secret, number = REQUEST.unpack(room)
        if not compare_digest(secret, self._secret):
            told = "tcp: %s asked for a piece of somebody else; hung up"
            self._strangers_told.say(log, logging.WARNING, told, peer, now_s=monotonic())
            return False
        with self._lock:
            self._strangers.pop(connection, None)
        data = self._pieces.get(number)
        connection.settimeout(STALL_TIMEOUT_S)
        connection.sendall(REPLY.pack(UNKNOWN if data is None else len(data)))
        if data is not None:
            _send(connection, memoryview(data))
        return not self._closed


def most_connections() -> int:
    """How many a store keeps."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, round(SHARE * limit)))


def _send(connection: socket.socket, data: memoryview) -> None:
    deadline_s = monotonic() + STALL_TIMEOUT_S + len(data) / LEAST_BYTES_PER_S
    while data:
        connection.settimeout(min(STALL_TIMEOUT_S, left_s(deadline_s)))
        data = data[connection.send(data[:SEND_BYTES]) :]
