"""Messages that a client does not take: one that reads nothing for long is gone, and what waits for it is dropped."""

from __future__ import annotations

import asyncio

import grpc.aio
from google.protobuf.message import Message

UNREAD_TIMEOUT_S = 60.0  # over HTTP, too (`http/protocol.py`); a large message may take longer:
SLOWEST_BYTES_PER_S = 2**16


async def is_taken(context: grpc.aio.ServicerContext, message: Message) -> bool:
    """Write it; False when the client does not take it."""
    try:
        async with asyncio.timeout(UNREAD_TIMEOUT_S + message.ByteSize() / SLOWEST_BYTES_PER_S):
            await context.write(message)
    except TimeoutError:
        return False
    return True


def not_taken(what: str) -> str:
    """What to tell the client, should it read after all."""
    return f"nothing of {what} was taken for {UNREAD_TIMEOUT_S:g} s; read sooner"
