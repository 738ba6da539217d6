"""The sockets on which jax's transfer servers listen for connections that carry bytes.

jax reads the first eight bytes of each on the one thread that all transfer servers of a process share, and waits for them: a D
that freezes between its connect and these bytes, or anybody who connects and says nothing, would hold up every transfer of the
process. What is accepted inherits the time-out of the socket that listens, so that one is set, from outside.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

FIRST_WORDS_S = 1.0  # for a round trip, by a process that waits for a core


def bound_first_words() -> None:
    """Hang up on whoever connects to a transfer server of this process and says nothing for FIRST_WORDS_S. Looks at all
    descriptors: what listens as jax does (shared port, never waiting in accept) and was not seen before."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # no socket, or closed by now
            _bound(descriptor)


def _bound(descriptor: int) -> None:
    listener = socket.socket(fileno=descriptor)
    try:
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) and not os.get_blocking(descriptor):
            limit = struct.pack("ll", int(FIRST_WORDS_S), int(FIRST_WORDS_S % 1 * 1e6))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    finally:
        listener.detach()
