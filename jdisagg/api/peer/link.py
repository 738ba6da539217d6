"""D's connection to one P: channel, Hello (once, and when asked again), what KV can come over, and whether P is usable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from secrets import token_hex
from time import monotonic

import grpc
import grpc.aio

from jdisagg.api.channels import NO_GRPC, Credentials, open_channel, speaks_no_grpc
from jdisagg.api.codec import decode_speed
from jdisagg.api.peer.identity_codec import decode_identity, encode_identity
from jdisagg.api.peer.piece_server import NO_PREFILL
from jdisagg.api.peer.ports import PeerPorts, Reached
from jdisagg.api.peer.shared_pulse import SharedPulse
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Unavailable
from jdisagg.core.speed import Speed
from jdisagg.core.told import told
from jdisagg.handoff.identity import SHARED_PULSE, Identity, Incompatible, agree, builds_of
from jdisagg.v1 import peer_pb2, peer_pb2_grpc

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 1.0  # or as long as a silent peer lives, but no longer than
LONGEST_HELLO_S = 5.0  # a hand-off waits 10 s for its first answer, and shall know of a dead P before


class HelloFailed(Exception):
    """The peer cannot be used now. `reason` is StreamEnded's: "hello" (refused) or "unreachable"."""

    def __init__(self, reason: str, error: Unavailable) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error


class PeerLink:
    """One channel. Used on one event loop, under `in_use`; when the peer's process is gone, drop it and make a new one."""

    def __init__(
        self, peer: str, identity: Identity, credentials: Credentials, *, is_registered: bool, dead_after_s: float
    ) -> None:
        """`is_registered`: `peer` is the address under which a worker registered, so nobody else is to answer there;
        `dead_after_s`: how long it may be silent."""
        self.peer = peer
        self._dead_after_s = dead_after_s
        self.draining = False  # by its last Hello: it refuses new hand-offs
        self.speed: tuple[Speed | None, float] = (None, -inf)  # by the same, which was said then
        self._is_registered = is_registered
        self._identity = identity
        self._channel = open_channel(peer, credentials)
        self._stub = peer_pb2_grpc.PeerServiceStub(self._channel)
        self._hello: asyncio.Task[Identity] | None = None
        self._ports = PeerPorts()
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._pulse: SharedPulse | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A stream lives on the channel, or is about to: `retire` waits for it."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                self._unused.set()

    @property
    def is_used(self) -> bool:
        """Whether a stream lives on it, which has heartbeats of its own, or a question is under way."""
        return self._num_users > 0

    async def retire(self) -> None:
        """Close once the last stream has ended: closing a channel ends every stream on it."""
        await self._unused.wait()
        await self.close()

    async def hello(self, *, again: bool = False) -> Identity:
        """The peer's identity; asks once and shares the answer. `again`: asks whatever was answered before, and shares a
        question that is under way. Raises HelloFailed within about a second, or as long as a silent peer lives, 5 s at most."""
        if self._hello is None or (again and self._hello.done()):
            self._hello = asyncio.create_task(self._say_hello())
        return await asyncio.shield(self._hello)

    async def reach(self, theirs: Identity, *, begins: bool) -> Reached:
        """What KV can come over from the worker that said this, in a hand-off if one `begins`; waits at most `PATIENCE_S` to
        know. Raises HelloFailed."""
        try:
            agreed = agree(theirs, self._identity).backends
        except Incompatible as error:  # P thought otherwise: it is older or newer than this
            why = f"prefill peer {self.peer}: {error}{builds_of(theirs, self._identity)}"
            raise HelloFailed("hello", Unavailable(why)) from error
        return await self._ports.reach(theirs, agreed, begins=begins)

    def unreached(self, backend: str, why: str) -> None:
        """Nothing was reached over that backend: KV comes over others for a while."""
        self._ports.unreached(backend, why)

    def pulse(self, theirs: Identity, config: TransferConfig) -> SharedPulse:
        """That of all streams to the worker that said this; a new one for each when it is older than that."""
        if min(theirs.max_protocol, self._identity.max_protocol) < SHARED_PULSE:
            return SharedPulse(config)
        self._pulse = self._pulse or SharedPulse(config, name=token_hex(8))
        return self._pulse

    def prefill(self, timeout_s: float) -> grpc.aio.StreamStreamCall:
        """Start a hand-off stream."""
        return self._stub.Prefill(timeout=timeout_s)

    async def close(self) -> None:
        """Close the channel and whatever runs on it. A bug in that is no reason to ask no more."""
        if self._hello is not None:
            await cancel_and_wait(self._hello)
        await self._ports.close()
        try:
            await self._channel.close()
        except Exception:
            log.exception("closing a connection to prefill peer %s failed", self.peer)

    async def _say_hello(self) -> Identity:
        answer = await self._ask()
        if isinstance(answer, HelloFailed):
            raise answer
        theirs = decode_identity(answer.identity)
        if self._is_registered and theirs.address not in (None, self.peer):
            look = "look at --advertise-host of the worker that registered there"
            raise HelloFailed("hello", Unavailable(f"prefill peer {self.peer}: it leads to {theirs.worker}; {look}"))
        self.draining = answer.draining
        self.speed = decode_speed(answer.speed), monotonic()
        return theirs

    async def _ask(self) -> peer_pb2.HelloResponse | HelloFailed:
        """What P says, or why it says nothing: no error of gRPC's, which would hold the call, by which gRPC takes a closed
        channel for used, and connects it again and again."""
        request = peer_pb2.HelloRequest(identity=encode_identity(self._identity))
        try:
            return await self._stub.Hello(request, timeout=min(max(HELLO_TIMEOUT_S, self._dead_after_s), LONGEST_HELLO_S))
        except grpc.aio.AioRpcError as error:
            reason = "hello" if error.code() is grpc.StatusCode.FAILED_PRECONDITION else "unreachable"
            said = NO_PREFILL if error.code() is grpc.StatusCode.UNIMPLEMENTED else told(error.details() or "")
            said = f"it {NO_GRPC}" if speaks_no_grpc(error) else said
            text = f"prefill peer {self.peer}: Hello: {error.code().name}: {said}"
            return HelloFailed(reason, Unavailable(text))
