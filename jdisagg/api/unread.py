"""Messages that a client does not take: one that reads nothing for long, or little for longer, is gone, and what waits for it
is dropped."""

from __future__ import annotations

import asyncio
from time import monotonic

import grpc.aio
from google.protobuf.message import Message

UNREAD_TIMEOUT_S = 60.0  # over HTTP, too (`http/protocol.py`); a large message may take longer:
SLOWEST_BYTES_PER_S = 2**16
SLOWEST_IN_ALL_BYTES_PER_S = 2**13  # of the time in which something waits for the client; a quick one makes none wait
OURS_S = 1.0  # of a message's time, which may be ours: a busy loop


class Reader:
    """Who takes the messages of one call."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._left_s = UNREAD_TIMEOUT_S

    async def takes(self, message: Message) -> bool:
        """Write it; False when the client does not take it, or has let too much of all that came before wait."""
        num_bytes, began_s = message.ByteSize(), monotonic()
        self._left_s += num_bytes / SLOWEST_IN_ALL_BYTES_PER_S
        try:
            async with asyncio.timeout(min(UNREAD_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S, self._left_s)):
                await self._context.write(message)
        except TimeoutError:
            return False
        self._left_s -= max(0.0, monotonic() - began_s - OURS_S)
        return True


def not_taken(what: str) -> str:
    """What to tell the client, should it read after all."""
    return f"nothing of {what} was taken for {UNREAD_TIMEOUT_S:g} s; read sooner"
