"""One hand-off stream seen from D, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import grpc
import grpc.aio

from jdisagg.api.codec import error_from_rpc
from jdisagg.api.in_order import is_long
from jdisagg.api.peer.codec import DOWN_HEARTBEAT, UpStream, encode_down
from jdisagg.api.peer.link import HelloFailed, PeerLink
from jdisagg.api.peer.outbox import Outbox
from jdisagg.api.peer.shared_pulse import Listener, SharedPulse
from jdisagg.api.pulse import QUIET_SHARE
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost, InvalidRequest, RequestError, Unavailable
from jdisagg.core.requests import GrammarKind
from jdisagg.handoff.identity import Identity
from jdisagg.handoff.messages import (
    Ack,
    Agreed,
    Awake,
    ChunkReady,
    Declined,
    Grant,
    Open,
    PrefillToDecode,
    Quiet,
    StreamEnded,
    Up,
    Want,
)
from jdisagg.v1 import peer_pb2

DEADLINE_GRACE_S = 2.0  # the engine ends a hand-off at its deadline; the RPC's own limit comes later
TAKEN = "jdisagg-taken"  # in what P sends ahead of its first message, before its engine has the request
UNCLEAR = "unclear"  # a write of ours failed: P has ended the stream, or its process is gone
_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAVAILABLE: "dead",
    grpc.StatusCode.UNKNOWN: "dead",
    grpc.StatusCode.INTERNAL: UNCLEAR,
    grpc.StatusCode.CANCELLED: "dead",
}


class PeerStream:
    """Messages to one P and back. `run` may be called again while P had nothing of it: everything sent is sent again."""

    def __init__(self, peer: str, opening: Open, config: TransferConfig) -> None:
        self.peer = peer
        self.taken = False  # P has read what it is asked for, and says so with its first word, or before
        self.closed = False
        self._opening = opening
        self._config = config
        self._sent: list[peer_pb2.PrefillRequest] = []  # kept until the first answer
        self._outbox: Outbox[peer_pb2.PrefillRequest] | None = None

    @property
    def grammar(self) -> GrammarKind | None:
        """What its request's grammar is written in; None = it has none."""
        return self._opening.request.grammar_kind

    def send(self, message: Grant | Ack | Want | ChunkReady | Declined) -> None:
        """Queue a message."""
        wire = encode_down(message, epoch="", now_s=0.0)
        if not self.taken:
            self._sent.append(wire)
        if self._outbox is not None:
            self._outbox.put(wire)

    def close(self) -> None:
        """End after what was sent before; idempotent."""
        self.closed = True
        if self._outbox is not None:
            self._outbox.close()

    async def run(
        self, link: PeerLink, theirs: Identity, backends: tuple[str, ...], deliver: Callable[[PrefillToDecode], None]
    ) -> StreamEnded:
        """Carry messages both ways until either side ends; says why. "epoch" = the peer is another process than `theirs`,
        UNCLEAR = ask it."""
        outbox, pulse = Outbox(DOWN_HEARTBEAT), link.pulse(theirs, self._config)
        self._outbox = outbox
        opening = replace(self._opening, backend=backends[0], backends=backends)
        deliver(Agreed(backends=backends))
        for wire in (encode_down(opening, epoch=theirs.epoch, now_s=monotonic(), pulse=pulse.name), *self._sent):
            outbox.put(wire)

        def note_quiet(is_quiet: bool) -> None:
            deliver(Quiet(self._config.dead_after_s * QUIET_SHARE) if is_quiet else Awake())

        listener = Listener(outbox.beat, on_quiet=note_quiet)
        call = link.prefill(max(0.0, self._opening.request.deadline_s - monotonic()) + DEADLINE_GRACE_S)
        read = asyncio.create_task(self._read(call, pulse, deliver))
        write = asyncio.create_task(_write(call, outbox))
        try:
            with pulse.hear(listener):
                done, _ = await asyncio.wait({read, listener.silent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            await cancel_and_wait(read, write)
        self.taken = self.taken or TAKEN in await call.initial_metadata()
        if read in done:
            return self._end(read.exception())
        silence = f"prefill peer {self.peer}: no heartbeat for {self._config.dead_after_s} s"
        return StreamEnded(reason="heartbeat", error=Unavailable(silence))

    async def _read(
        self, call: grpc.aio.StreamStreamCall, pulse: SharedPulse, deliver: Callable[[PrefillToDecode], None]
    ) -> None:
        up = UpStream()
        async for wire in call:
            if wire is None:  # gRPC's word for bytes that are no message
                raise InvalidRequest("bytes that are no message")
            for message in await self._decoded(up, wire, pulse):
                self.taken = True
                self._sent.clear()
                deliver(message)
            pulse.heard()  # afterwards: who only wakes up to refuse is not gone back to

    async def _decoded(self, up: UpStream, wire: peer_pb2.PrefillResponse, pulse: SharedPulse) -> list[Up]:
        """The messages in `wire`. A first token with the log-probabilities of a long prompt takes up to seconds to read: beside
        the loop, and P is not silent meanwhile."""
        if not is_long(wire.done.first):
            return up.read(wire)
        reading = asyncio.create_task(asyncio.to_thread(up.read, wire))
        while not reading.done():
            pulse.heard()
            await asyncio.wait({reading}, timeout=self._config.heartbeat_s)
        return reading.result()

    def _end(self, error: BaseException | None) -> StreamEnded:
        if error is None:
            return _closed(self.peer)
        if isinstance(error, RequestError):  # P's fault: its own type would have the client believe that it is the request's
            lost = HandoffLost(f"a message of prefill peer {self.peer} cannot be read: {error}")
            return StreamEnded(reason="unreadable", error=lost)
        if not isinstance(error, grpc.aio.AioRpcError):
            raise error
        reason = _REASONS.get(error.code(), "closed")
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not self.taken:
            reason = "epoch"
        return StreamEnded(reason=reason, error=error_from_rpc(error, f"prefill peer {self.peer}: hand-off stream"))


async def cleared_up(ended: StreamEnded, link: PeerLink, epoch: str) -> StreamEnded:
    """What became of a stream that ended without P's status: its process answers, or it does not. The error is gRPC's own."""
    try:
        answers = (await link.hello(again=True)).epoch == epoch
    except HelloFailed:
        answers = False
    return _closed(link.peer) if answers else replace(ended, reason="dead")


def _closed(peer: str) -> StreamEnded:
    """P has ended it without a word: its process goes on, so that its log has what it missed."""
    why = "it ended the stream, as it missed our heartbeats for --dead-after-s or could not go on; its log says which"
    return StreamEnded(reason="closed", error=Unavailable(f"prefill peer {peer}: {why}"))


async def _write(call: grpc.aio.StreamStreamCall, outbox: Outbox[peer_pb2.PrefillRequest]) -> None:
    await outbox.pump(call.write)
    await call.done_writing()
