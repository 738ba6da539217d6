"""A P and a D without engines, at the two ends of real hand-off streams: what each is told, it keeps in a list."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

import grpc

from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.codec import DOWN_HEARTBEAT, encode_down
from jdisagg.api.peer.identity_codec import encode_identity
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.core.config import TransferConfig
from jdisagg.handoff.events import FromPrefill, PeerAlive, PeerMessage, PeerOpened
from jdisagg.handoff.identity import Backend, Identity
from jdisagg.handoff.messages import Awake, ChunkReady, HandoffId, MadeAtDecode, Open, Quiet, StreamEnded
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.wire.rig import FAST, identity, request, start_server, until

CHUNK = ChunkReady(key="k", begin=1, end=3, shape=(2, 2, 2, 8), dtype="float32", num_bytes=256, checksum=2**64 - 1)
H1 = HandoffId("r", 1)
H2 = HandoffId("r", 2)
SHM, OTHER_SHM = Backend(name="shm", version="this host"), Backend(name="shm", version="another host")


class Prefill:
    """A P whose engine is this list of events."""

    def __init__(self, who: Identity, config: TransferConfig = FAST) -> None:
        self.events: list[PeerOpened | PeerMessage | PeerAlive] = []
        self.pieces: dict[str, bytes] = {}
        self.service = PeerServer(who, post=self.events.append, pieces=self.pieces, config=config)

    async def start(self, port: int = 0) -> str:
        self.server, address = await start_server(lambda server: add_peer_service(self.service, server), port)
        return address

    def opened(self) -> list[PeerOpened]:
        return [event for event in self.events if isinstance(event, PeerOpened)]

    def messages(self) -> list[object]:
        return [event.message for event in self.events if isinstance(event, PeerMessage)]

    def ends(self) -> list[str]:
        return [message.reason for message in self.messages() if isinstance(message, StreamEnded)]


class Decode:
    """A D whose inbox is a list."""

    def __init__(self, who: Identity | None = None, config: TransferConfig = FAST) -> None:
        self.events: list[FromPrefill] = []
        self.client = GrpcPeerClient(
            who or identity(epoch="d"),
            loop=asyncio.get_running_loop(),
            post=self.events.append,
            config=config,
        )

    def usable(self, peer: str) -> bool:
        """Whether the last thing heard of it was good."""
        return self.client.failures().get(peer) == ""

    def messages(self, handoff: HandoffId) -> list[object]:
        """What P said, and the end."""
        mine = [event.message for event in self.events if event.handoff == handoff]
        return [message for message in mine if not isinstance(message, MadeAtDecode)]

    def pulse(self, handoff: HandoffId) -> list[type]:
        """What was noticed of P's heartbeats, and the end."""
        mine = [event.message for event in self.events if event.handoff == handoff]
        return [type(message) for message in mine if isinstance(message, Quiet | Awake | StreamEnded)]

    def ends(self, handoff: HandoffId) -> list[str]:
        return [message.reason for message in self.messages(handoff) if isinstance(message, StreamEnded)]


async def lost(d: Decode, address: str) -> None:
    """Waits until D's connection to a P that stopped is: what is asked before that ends with the old process's GOAWAY."""
    if (link := d.client._links.find(address)) is not None:
        await until(lambda: link._channel.get_state() is not grpc.ChannelConnectivity.READY)


def opening(request_id: str = "r") -> Open:
    return Open(request=request(request_id), held_tokens=1, backend="grpc")


async def opened_by_hand(stub: peer_pb2_grpc.PeerServiceAsyncStub, p: Prefill, request_id: str) -> grpc.aio.StreamStreamCall:
    """A stream of a D that sends no heartbeats and reads when the test does. Like D it sends again what came late."""
    before = len(p.opened())
    hello = await stub.Hello(peer_pb2.HelloRequest(identity=encode_identity(identity(epoch="d"))))
    while True:
        call = stub.Prefill()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(encode_down(opening(request_id), epoch=hello.identity.epoch, now_s=monotonic()))
        await until(lambda: len(p.opened()) > before or call.done())  # noqa: B023
        if len(p.opened()) > before:
            return call
        if await call.code() is not grpc.StatusCode.INTERNAL:  # which it is where the write met the end of the stream
            assert "no `open` came within" in await call.details()


async def beat(call: grpc.aio.StreamStreamCall) -> None:
    """For a D by hand: it is alive, and says so."""
    while True:
        await call.write(DOWN_HEARTBEAT)
        await asyncio.sleep(FAST.heartbeat_s)
