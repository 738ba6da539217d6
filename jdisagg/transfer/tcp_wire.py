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
from time import monotonic

REQUEST, REPLY = Struct("!16sQ"), Struct("!q")
UNKNOWN = -1
SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Locator:
    """Where a piece is."""

    host: str  # without brackets
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
        if not 0 < locator.port < 2**16 or len(locator.secret) != SECRET_BYTES:
            raise KeyError(f"piece {text!r}: wanted a port and {SECRET_BYTES} bytes of secret")
        return locator


def left_s(deadline_s: float) -> float:
    """Until then; raises TimeoutError when it has passed."""
    seconds = deadline_s - monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline passed")
    return seconds


def receive_into(connection: socket.socket, room: memoryview, deadline_s: float) -> int:
    """Fill `room`; fewer bytes only when the other side hung up. Raises TimeoutError."""
    filled = 0
    while filled < len(room):
        connection.settimeout(left_s(deadline_s))
        count = connection.recv_into(room[filled:])
        if count == 0:
            break
        filled += count
    return filled


def hang_up(connection: socket.socket) -> None:
    """End it for both, also for a thread that waits on it; whoever owns it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
