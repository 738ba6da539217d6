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
from jdisagg.api.peer_codec import DOWN_HEARTBEAT, Up, UpStream, encode_down
from jdisagg.api.peer_link import PeerLink
from jdisagg.api.pulse import QUIET_SHARE, Pulse, cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import HandoffLost, InvalidRequest, RequestError, Unavailable
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
    Want,
)
from jdisagg.v1 import peer_pb2

DEADLINE_GRACE_S = 2.0  # the engine ends a hand-off at its deadline; the RPC's own limit comes later
UNCLEAR = "unclear"  # a write of ours failed: P has ended the stream, or its process is gone
_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAVAILABLE: "dead",
    grpc.StatusCode.UNKNOWN: "dead",
    grpc.StatusCode.INTERNAL: UNCLEAR,
    grpc.StatusCode.CANCELLED: "dead",
}


class PeerStream:
    """Messages to one P and back. `run` may be called again while nothing was answered: everything sent is sent again."""

    def __init__(self, peer: str, opening: Open, config: TransferConfig) -> None:
        self.peer = peer
        self.answered = False
        self.closed = False
        self._opening = opening
        self._config = config
        self._sent: list[peer_pb2.PrefillRequest] = []  # kept until the first answer
        self._queue: asyncio.Queue[peer_pb2.PrefillRequest | None] | None = None  # None in the queue ends the stream

    def send(self, message: Grant | Ack | Want | ChunkReady | Declined) -> None:
        """Queue a message."""
        wire = encode_down(message, epoch="", now_s=0.0)
        if not self.answered:
            self._sent.append(wire)
        if self._queue is not None:
            self._queue.put_nowait(wire)

    def close(self) -> None:
        """End after what was sent before; idempotent."""
        self.closed = True
        if self._queue is not None:
            self._queue.put_nowait(None)

    async def run(
        self, link: PeerLink, epoch: str, backends: tuple[str, ...], deliver: Callable[[PrefillToDecode], None]
    ) -> StreamEnded:
        """Carry messages both ways until either side ends; says why. "epoch" = the peer is another process than it was,
        UNCLEAR = ask it."""
        queue = self._queue = asyncio.Queue()
        opening = replace(self._opening, backend=backends[0], backends=backends)
        deliver(Agreed(backends=backends))
        for wire in (encode_down(opening, epoch=epoch, now_s=monotonic()), *self._sent):
            queue.put_nowait(wire)

        def note_quiet(is_quiet: bool) -> None:
            deliver(Quiet(self._config.dead_after_s * QUIET_SHARE) if is_quiet else Awake())

        pulse = Pulse(heartbeat_s=self._config.heartbeat_s, dead_after_s=self._config.dead_after_s, on_quiet=note_quiet)
        call = link.prefill(max(0.0, self._opening.request.deadline_s - monotonic()) + DEADLINE_GRACE_S)
        read = asyncio.create_task(self._read(call, pulse, deliver))
        write = asyncio.create_task(_write(call, queue))
        beat = asyncio.create_task(pulse.run(lambda: queue.put_nowait(DOWN_HEARTBEAT) if queue.empty() else None))
        try:
            done, _ = await asyncio.wait({read, beat}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            await cancel_and_wait(read, write, beat)
        if read in done:
            return self._end(read.exception())
        silence = f"prefill peer {self.peer}: no heartbeat for {self._config.dead_after_s} s"
        return StreamEnded(reason="heartbeat", error=Unavailable(silence))

    async def _read(self, call: grpc.aio.StreamStreamCall, pulse: Pulse, deliver: Callable[[PrefillToDecode], None]) -> None:
        up = UpStream()
        async for wire in call:
            if wire is None:  # gRPC's word for bytes that are no message
                raise InvalidRequest("bytes that are no message")
            for message in await self._decoded(up, wire, pulse):
                self.answered = True
                self._sent.clear()
                deliver(message)
            pulse.heard()  # afterwards: who only wakes up to refuse is not gone back to

    async def _decoded(self, up: UpStream, wire: peer_pb2.PrefillResponse, pulse: Pulse) -> list[Up]:
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
            return StreamEnded(reason="closed")
        if isinstance(error, RequestError):  # P's fault: its own type would have the client believe that it is the request's
            lost = HandoffLost(f"a message of prefill peer {self.peer} cannot be read: {error}")
            return StreamEnded(reason="dead", error=lost)
        if not isinstance(error, grpc.aio.AioRpcError):
            raise error
        reason = _REASONS.get(error.code(), "closed")
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not self.answered:
            reason = "epoch"
        return StreamEnded(reason=reason, error=error_from_rpc(error, f"prefill peer {self.peer}: hand-off stream"))


async def _write(call: grpc.aio.StreamStreamCall, queue: asyncio.Queue[peer_pb2.PrefillRequest | None]) -> None:
    while (wire := await queue.get()) is not None:
        await call.write(wire)
    await call.done_writing()
