"""P's side of PeerService: Hello, hand-off streams into the engine's inbox, bytes of published pieces.

    Prefill stream:  first message Open -> PeerOpened(handoff, open, peer, reply) is posted, once its grammar is compiled
                     every later one    -> PeerMessage(handoff, message), not before that
                     its end            -> PeerMessage(handoff, StreamEnded(reason)), exactly once, whatever ended it; nothing
                                           when it was not opened

Heartbeats go both ways, for all streams of one D at once; one that is silent for `dead_after_s` has its streams ended with
"heartbeat". One that beats and does not read has the stream ended on which too much waits, with "unread".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import monotonic
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from jdisagg.api.codec import encode_speed, refuse
from jdisagg.api.peer.codec import decode_down
from jdisagg.api.peer.identity_codec import decode_identity, encode_identity
from jdisagg.api.peer.piece_server import PieceServer
from jdisagg.api.peer.reply import Post, Posts, StreamReply
from jdisagg.api.peer.shared_pulse import Listener, SharedPulse
from jdisagg.api.peer.stream import TAKEN
from jdisagg.api.status_details import end_call
from jdisagg.api.tasks import cancel_and_wait, first_message
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost, InvalidRequest, OtherProcess, RequestError, Unavailable
from jdisagg.core.latest import remember
from jdisagg.core.logs import Seldom
from jdisagg.core.speed import Speed
from jdisagg.core.told import told
from jdisagg.handoff.events import PeerAlive, PeerMessage, PeerOpened
from jdisagg.handoff.identity import Identity, Incompatible, agree, builds_of
from jdisagg.handoff.messages import HandoffId, Open, Refused, StreamEnded
from jdisagg.text.grammar import Compiled, Grammars
from jdisagg.transfer.grpc_backend import PieceStore
from jdisagg.v1 import peer_pb2

log = logging.getLogger(__name__)

LEASE_NEWS = 0.25  # of a lease: how often the engine hears that a silent D is alive
LAST_WRITE_S = 22.0  # gRPC finds out in this time that a connection is dead
CANCEL_LAG_S = 0.05  # a connection that is gone may read as an end in good order until gRPC cancels the handler, moments later
LINGER_SHARE = 0.3  # of `dead_after_s`: D takes silence of P up to here for nothing
MOST_CALLERS = 4096  # whose names are kept for the log
MOST_UNREAD = 2**16  # messages that wait for one D to read; its credit and heartbeats make fewer
TOLD_EVERY_S, TOLD_FIRST = 10.0, 32  # hand-offs that end badly: a worker's worth of them is in the log, a storm of them is not
_BROKEN = {
    "dead": "the connection to its decode worker is gone",
    "heartbeat": "no heartbeat of its decode worker for --dead-after-s",
    "unread": "its decode worker beats and leaves {most_unread} messages unread",
}


class PeerServer(PieceServer):
    """PeerService of one prefill worker. Add it to a grpc.aio server with `add_peer_service`."""

    def __init__(
        self,
        identity: Identity,
        *,
        post: Post,
        pieces: PieceStore | None,
        config: TransferConfig,
        grammars: Grammars | None = None,
        is_over: Callable[[], bool] = lambda: False,
        speed: Callable[[], Speed | None] = lambda: None,
    ) -> None:
        """`post` must be thread-safe and not block; `pieces` is None when the grpc backend is not served; `grammars`: the
        engine's; `is_over`: whether that has raised; `speed`: at which it was seen to compute prompts, asked at every Hello."""
        super().__init__(pieces)
        self._identity = identity
        self._post = post
        self._config = config
        self._grammars = grammars
        self._is_over = is_over
        self._speed = speed
        self._serials = itertools.count(1)
        self._told_broken, self._told_unread = (Seldom(TOLD_EVERY_S, TOLD_FIRST) for _ in range(2))
        self._pulses: WeakValueDictionary[str, SharedPulse] = WeakValueDictionary()  # of those who have streams, by Open.pulse
        self._workers: dict[str, str] = {}  # by their connection, those that said Hello on it
        self._replies: set[StreamReply] = set()  # of open streams, each of a hand-off
        self._draining = False

    def drain(self) -> None:
        """Say from now on that new hand-offs are refused; the engine refuses them. On the loop."""
        self._draining = True

    def send_away(self) -> None:
        """Refuse what is left when the time to drain is over, before the streams break: nobody died of it. On the loop."""
        error = Unavailable(f"{self._identity.worker} has drained for as long as it may, and ends")
        for reply in self._replies:
            reply.send(Refused(error=error))
            reply.close()

    @property
    def num_streams(self) -> int:
        """Open ones."""
        return len(self._replies)

    async def Hello(self, request: peer_pb2.HelloRequest, context: grpc.aio.ServicerContext) -> peer_pb2.HelloResponse | None:
        """Settle protocol and backend, or refuse with the field that does not match."""
        theirs = decode_identity(request.identity)
        try:
            agreement = agree(self._identity, theirs)
        except Incompatible as error:
            text = f"{self._identity.worker} cannot serve {theirs.worker}{builds_of(self._identity, theirs)}: {error}"
            return end_call(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        remember(self._workers, context.peer(), theirs.worker, MOST_CALLERS)
        return peer_pb2.HelloResponse(
            identity=encode_identity(self._identity),
            protocol=agreement.protocol,
            backend=agreement.backend,
            draining=self._draining,
            speed=encode_speed(self._speed()),
        )

    async def Prefill(
        self, request_iterator: AsyncIterator[peer_pb2.PrefillRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One hand-off."""
        try:
            opened, pulse = await self._read_open(request_iterator)
        except RequestError as error:
            return refuse(context, error)
        if self._is_over():  # this process ends in a moment: who comes now does not go down with it
            return end_call(context, grpc.StatusCode.UNAVAILABLE, "its engine has stopped; see its log")
        with suppress(grpc.aio.BaseError):  # D is gone, as it turns out below
            await context.send_initial_metadata(((TAKEN, "1"),))  # so that it knows, should this process die of it
        handoff = HandoffId(opened.request.request_id, next(self._serials))
        reply = StreamReply(asyncio.get_running_loop(), MOST_UNREAD)
        reason, unread, cut_short = "dead", None, True  # what a cancelled handler means: the connection is gone
        write = asyncio.create_task(reply.pump(context.write, self._config.heartbeat_s))
        posts = Posts(self._post)
        opening = asyncio.create_task(self._open(posts, PeerOpened(handoff, opened, context.peer(), reply)))
        self._replies.add(reply)
        try:
            try:
                reason, unread = await self._converse(handoff, request_iterator, reply, write, pulse, post=posts.put)
                cut_short = not write.done()
            finally:
                self._replies.discard(reply)
                opening.cancel()
                reply.abandon()
                posts.end(PeerMessage(handoff, StreamEnded(reason=reason)))
                if unread is None:
                    await self._tell_broken(reason, handoff, context, cut_short=cut_short)
            await asyncio.wait({write}, timeout=LAST_WRITE_S)  # gRPC accepts no status while the first message is on its way
            if not write.done():
                raise asyncio.CancelledError
            if unread is not None:  # not the fault of who made the request, as InvalidRequest would have D believe
                text, what = "request %s of %s: a message cannot be read: %s", (handoff.request_id, self._caller(context))
                self._told_unread.say(log, logging.WARNING, text, *what, unread, now_s=monotonic())
                refuse(context, HandoffLost(f"{self._identity.worker} cannot read a message: {unread}"))
        finally:
            await cancel_and_wait(write)

    async def _open(self, posts: Posts, opened: PeerOpened) -> Compiled | None:
        """Post it, once the engine takes no time for its grammar, which is to be held as long as the stream is open."""
        grammar, held = opened.message.request.sampling.grammar, None
        if grammar is not None and self._grammars is not None:
            try:
                held = await self._grammars.ahead(grammar)
            except RequestError as error:
                opened.reply.send(Refused(error=error))
                opened.reply.close()
                return None
        posts.begin(opened)
        return held

    async def _tell_broken(
        self, reason: str, handoff: HandoffId, context: grpc.aio.ServicerContext, *, cut_short: bool
    ) -> None:
        """Log a stream that did not end in good order. `cut_short`: P had not said its last."""
        try:
            if reason == "closed" and cut_short:
                await asyncio.sleep(CANCEL_LAG_S)
        except asyncio.CancelledError:
            reason = "dead"
            raise
        finally:
            if reason in _BROKEN:
                text, what = "request %s of %s: %s; the hand-off is over", (handoff.request_id, self._caller(context))
                self._told_broken.say(
                    log, logging.INFO, text, *what, _BROKEN[reason].format(most_unread=MOST_UNREAD), now_s=monotonic()
                )

    def _caller(self, context: grpc.aio.ServicerContext) -> str:
        """The decode worker by its own name; where it said that on another connection, by the port of this one."""
        return self._workers.get(context.peer(), context.peer())

    async def _read_open(self, requests: AsyncIterator[peer_pb2.PrefillRequest]) -> tuple[Open, SharedPulse]:
        """The stream's first message, and whose life it shares. Raises RequestError when it is not a good Open for this
        process."""
        first = await first_message(requests, peer_pb2.PrefillRequest(), self._config.dead_after_s)
        if first is None:  # it is on its way, or D stands still: not the request's fault, and D has other rungs
            raise Unavailable(f"prefill stream: no `open` came within {self._config.dead_after_s:g} s")
        opened = decode_down(first, monotonic())
        if not isinstance(opened, Open):
            raise InvalidRequest("prefill stream: the first message must be `open`", field="open")
        if first.open.epoch != self._identity.epoch:
            wanted, got = self._identity.epoch, told(first.open.epoch)
            raise OtherProcess(f"epoch: wanted {wanted}, got {got}; say Hello again")
        if not (name := first.open.pulse):
            return opened, SharedPulse(self._config)
        pulse = self._pulses.setdefault(name, SharedPulse(self._config, name))
        pulse.heard()
        return opened, pulse

    async def _converse(
        self,
        handoff: HandoffId,
        requests: AsyncIterator[peer_pb2.PrefillRequest],
        reply: StreamReply,
        write: asyncio.Task[None],
        pulse: SharedPulse,
        *,
        post: Post,
    ) -> tuple[str, InvalidRequest | None]:
        """Carry messages both ways until one side ends; returns why, and what is wrong with a message that cannot be read."""
        told_s = monotonic()

        def renew() -> None:
            nonlocal told_s
            if monotonic() - told_s >= self._config.lease_s * LEASE_NEWS:
                told_s = monotonic()
                post(PeerAlive(handoff))

        listener = Listener(reply.outbox.beat, on_alive=renew)
        read = asyncio.create_task(self._read(handoff, requests, pulse, reply, post))
        over = {listener.silent, reply.unread}
        try:
            with pulse.hear(listener):
                done, _ = await asyncio.wait({read, write, *over}, return_when=asyncio.FIRST_COMPLETED)
            if done == {write} and write.exception() is None:  # P has said its last
                reply.abandon()
                # D ends its half when it has read that. What D writes to a stream that is over fails, and gRPC for Python
                # then loses P's last messages and its status.
                await asyncio.wait({read}, timeout=self._config.dead_after_s * LINGER_SHARE)
        finally:
            await cancel_and_wait(read)
        error = None if read.cancelled() else read.exception()
        if isinstance(error, InvalidRequest) and read in done:
            return "dead", error
        if not isinstance(error, None | InvalidRequest | grpc.aio.BaseError):  # a bug of ours, and no connection that is gone
            log.error("request %s: reading its stream failed; the hand-off is over", handoff.request_id, exc_info=error)
            return "closed", None
        if read in done or write in done:
            return "closed" if all(task.exception() is None for task in done) else "dead", None
        return ("unread" if reply.unread.done() else "heartbeat"), None

    async def _read(
        self,
        handoff: HandoffId,
        requests: AsyncIterator[peer_pb2.PrefillRequest],
        pulse: SharedPulse,
        reply: StreamReply,
        post: Post,
    ) -> None:
        async for wire in requests:
            pulse.heard()
            if not reply.gone:
                message = decode_down(wire, monotonic())
                if message is not None and not isinstance(message, Open):
                    post(PeerMessage(handoff, message))
