"""What P says on one hand-off's stream, from its engine's thread to the wire, and what its engine hears of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from jdisagg.api.in_order import is_long
from jdisagg.api.peer.codec import UP_HEARTBEAT, encode_up
from jdisagg.api.peer.outbox import Outbox
from jdisagg.api.tasks import call_on
from jdisagg.handoff.events import PeerAlive, PeerMessage, PeerOpened
from jdisagg.handoff.messages import Done, MadeAtDecode, PrefillToDecode, StreamEnded, Up
from jdisagg.v1 import peer_pb2

log = logging.getLogger(__name__)

Event = PeerOpened | PeerMessage | PeerAlive
Post = Callable[[Event], None]
Write = Callable[[peer_pb2.PrefillResponse], Awaitable[object]]


class StreamReply:
    """`handoff.events.ReplyStream` over an outbox that the loop pumps. The engine's thread encodes nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most_unread: int) -> None:
        """On the loop. D may leave `most_unread` messages unread."""
        self._loop = loop
        self._most_unread = most_unread
        self.outbox = Outbox[Up | peer_pb2.PrefillResponse](UP_HEARTBEAT)
        self.unread: asyncio.Future[None] = loop.create_future()  # done when D leaves too much unread: the hand-off is over
        self.gone = False  # written and read on the loop: the hand-off is over, what still comes is for nobody

    def send(self, message: PrefillToDecode) -> None:
        """Any thread; dropped when the stream is gone."""
        if isinstance(message, StreamEnded):
            self.close()
        elif not isinstance(message, MadeAtDecode):
            self._cross(partial(self._put, message))

    def close(self) -> None:
        """Any thread: end the stream after what was sent before."""
        self._cross(self.outbox.close)

    def abandon(self) -> None:
        """Loop only: drop everything but what is on its way, and end the stream with that."""
        self.gone = True
        self.outbox.abandon()

    async def pump(self, write: Write, heartbeat_s: float) -> None:
        """Loop only: write until closed. Beats while a first token with the log-probabilities of a long prompt, which takes up
        to seconds to encode, is encoded beside the loop."""
        await self.outbox.pump(lambda message: _write(message, write, heartbeat_s))

    def _cross(self, function: Callable[[], None]) -> None:
        if not self.gone:
            call_on(self._loop, function)

    def _put(self, message: Up) -> None:
        if len(self.outbox) >= self._most_unread:
            self.abandon()
            if not self.unread.done():
                self.unread.set_result(None)
        elif not self.gone:
            self.outbox.put(message)


class Posts:
    """What P's engine hears of one hand-off; what comes before its beginning waits for that. On the loop. `post` must be
    thread-safe and not block."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._early: list[Event] | None = []  # None: it has begun

    def begin(self, opened: PeerOpened) -> None:
        """Post this one, and what waits for it."""
        early, self._early = self._early, None
        for event in (opened, *(early or ())):
            self._post(event)

    def put(self, event: Event) -> None:
        """Post it now or then."""
        if self._early is None:
            self._post(event)
        else:
            self._early.append(event)

    def end(self, event: PeerMessage) -> None:
        """The last one; of no use when there was no beginning, which does not come any more."""
        if self._early is None:
            self._post(event)


async def _write(message: Up | peer_pb2.PrefillResponse, write: Write, heartbeat_s: float) -> None:
    if isinstance(message, peer_pb2.PrefillResponse):
        await write(message)
        return
    if isinstance(message, Done) and is_long(message.first):
        encoding = asyncio.create_task(asyncio.to_thread(_encode, message))
        while not encoding.done():
            await write(UP_HEARTBEAT)
            await asyncio.wait({encoding}, timeout=heartbeat_s)
        await write(encoding.result())
    else:
        await write(_encode(message))


def _encode(message: Up) -> peer_pb2.PrefillResponse:
    try:
        return encode_up(message)
    except Exception:  # a bug of ours: without this line the end of the stream would look like a broken connection
        log.exception("a %s cannot be encoded; its hand-off is over", type(message).__name__)
        raise
