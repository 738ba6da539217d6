"""Backend "tcp" on the wire: pieces go from P's memory into a plain socket, without gRPC's copies. For networks that need no
encryption.

    D -> P   secret of P's store (16 bytes) | number of the piece (8)        one request after the other on a connection
    P -> D   number of bytes (8), -1 = no such piece | bytes

A piece's locator is "HOST:PORT secret number". Whoever does not know the secret is hung up on.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError

REQUEST, REPLY = Struct("!16sQ"), Struct("!q")
UNKNOWN = -1
SECRET_BYTES = 16
SOCKET_BUFFER_BYTES = 2**20
IDLE_TIMEOUT_S = 120.0  # P hangs up, and D closes its end when it next connects to somebody


@dataclass(frozen=True, slots=True)
class Locator:
    """Where a piece is."""

    host: str
    port: int
    secret: bytes
    number: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port} {self.secret.hex()} {self.number}"

    @classmethod
    def parse(cls, text: str) -> Locator:
        """Raises KeyError when the text is none."""
        try:
            address, secret, number = text.split(" ")
            host, _, port = address.rpartition(":")
            locator = cls(host, int(port), bytes.fromhex(secret), int(number))
            REQUEST.pack(locator.secret, locator.number)
        except (ValueError, StructError) as error:
            raise KeyError(f"piece {text!r}: wanted HOST:PORT secret number") from error
        return locator


def receive_into(connection: socket.socket, room: memoryview) -> int:
    """Fill `room`; fewer bytes only when the other side hung up."""
    filled = 0
    while filled < len(room) and (count := connection.recv_into(room[filled:])):
        filled += count
    return filled


def set_options(connection: socket.socket) -> None:
    """Of either end."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def hang_up(connection: socket.socket) -> None:
    """End it for both, also for a thread that waits on it; whoever owns it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
