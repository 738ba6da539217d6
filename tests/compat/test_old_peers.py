"""A P or a D of the first v1 completes hand-offs with one of today, over the codec and over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.api.codec import decode_error, encode_error
from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.codec import UpStream, decode_down, encode_down, encode_up
from jdisagg.api.peer.identity_codec import encode_identity
from jdisagg.api.peer.piece_server import add_peer_service
from jdisagg.api.peer.server import PeerServer
from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.errors import Deadly, HandoffLost
from jdisagg.core.requests import Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Accepted, ChunkReady, Done, HandoffId, MadeAtDecode, Open, Started, StreamEnded
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.compat.schema import FIRST, RECORDED, Peer
from tests.unit.handoff.parties import Stream
from tests.unit.handoff.rig import decode_side, ready, request
from tests.unit.handoff.world import World
from tests.unit.wire.rig import FAST, identity, run_quiet, start_server

CONFIG = TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=1000, local_prefill=LocalPrefill.NEVER)
OLD = {path.stem: Peer(path) for path in (FIRST, RECORDED)}


class WiredWorld(World):
    """Every message crosses the codec and reaches a process that knows only what an old one knew."""

    def __init__(self, config: TransferConfig, old: Peer) -> None:
        super().__init__(config)
        self._old = old
        self._up: dict[HandoffId, UpStream] = {}
        self.begun: set[str] = set()

    def run_decode(self, actions: Sequence[act.DecodeAction]) -> None:
        super().run_decode(actions)
        for action in actions:
            if isinstance(action, act.PeerReady):
                self.begun.add(action.request_id)

    def deliver_down(self, stream: Stream) -> None:
        message = stream.down[0]
        if not isinstance(message, StreamEnded):
            wire = self._old.relay(encode_down(message, epoch="e", now_s=self.now_s))
            decoded = decode_down(wire, self.now_s)
            if decoded is None:
                stream.down.popleft()
                return
            stream.down[0] = decoded
        super().deliver_down(stream)

    def deliver_up(self, stream: Stream) -> None:
        message = stream.up.popleft()
        wire = None if isinstance(message, StreamEnded | MadeAtDecode) else encode_up(message)
        reader = self._up.setdefault(stream.handoff, UpStream())
        heard = [message] if wire is None else reader.read(self._old.relay(wire))  # None: nothing that travels
        stream.up.extendleft(reversed(heard))
        for _ in heard:
            super().deliver_up(stream)


@pytest.mark.parametrize("schema", OLD)
@pytest.mark.parametrize("eager", [False, True], ids=["old P", "old D"])
@given(tokens=st.integers(1, 13), held=st.integers(0, 12), max_tokens=st.sampled_from([1, 2, 9]))
def test_a_hand_off_completes_when_one_side_is_older(schema: str, eager: bool, tokens: int, held: int, max_tokens: int) -> None:
    """An old D is `eager`: it takes its memory whatever P says. One of today waits until P has begun."""
    world = WiredWorld(CONFIG, OLD[schema])
    world.start(request(tokens, max_tokens), min(held, tokens), ("p0",))
    (client,) = world.clients.values()
    if eager:
        world.reserve("r")
    world.settle()
    if not client.ends:
        assert world.begun == {"r"}, "nothing told D that it may take memory"
        world.reserve("r")
        world.settle()
    assert client.ends in (["complete"], ["finished"])
    assert client.tokens == 1
    assert all(not worker.held_bytes for worker in world.prefillers.values())


def test_a_piece_that_fails_is_asked_for_again_by_a_side_that_knows_no_groups() -> None:
    world = WiredWorld(CONFIG, OLD["first"])
    world.start(request(8, 4), 0, ("p0",))
    world.settle()
    world.reserve("r")
    for _ in range(200):
        for stream in list(world.streams.values()):
            while stream.down:
                world.deliver_down(stream)
            while stream.up:
                world.deliver_up(stream)
        for worker in world.prefillers.values():
            while worker.exporting:
                world.publish("p0", "ok")
        for fetch in list(world.fetches)[:1]:
            world.finish_fetch(fetch, "checksum" if fetch.ready.key == "p0-0" else "ok")
    assert world.clients["r"].ends == ["complete"]
    assert len(world.prefillers["p0"].ranges) == 3, "one of two ranges was published twice"


def test_a_router_that_cannot_know_what_took_prefill_workers_down_hears_of_a_lost_hand_off() -> None:
    wire = encode_error(Deadly("they may have died of it", num_down=4))
    heard = decode_error(OLD["first"].relay(wire))
    assert (type(heard), heard.message) == (HandoffLost, "they may have died of it")
    assert type(decode_error(wire)) is Deadly
    wire.ClearField("num_down")  # by a worker that knows of four alone
    assert vars(decode_error(wire))["num_down"] == 4


def test_what_an_old_prefill_worker_never_says_is_said_once_for_it() -> None:
    output = Output(request_id="r", token_ids=(1,))
    old = [Accepted(cached_tokens=0), ready("k", 0, 4), ready("l", 4, 8), Done(first=output, num_chunks=2)]
    for spoken in (old, [old[0], Started(), *old[1:]]):
        up = UpStream()
        heard = [message for item in spoken for message in up.read(encode_up(item))]
        assert [type(message) for message in heard] == [Accepted, Started, ChunkReady, ChunkReady, Done]
    assert UpStream().read(peer_pb2.PrefillResponse(heartbeat=peer_pb2.PrefillResponse.Heartbeat())) == []


class OldPrefill(peer_pb2_grpc.PeerServiceServicer):
    """The other side of the wire, as the first v1 had it: two pieces, a token, and not a field more."""

    def __init__(self) -> None:
        self.old = OLD["first"]
        self.identity = encode_identity(identity(epoch="old-1", max_protocol=1))
        self.opened: list[peer_pb2.Open] = []

    async def Hello(self, asked: peer_pb2.HelloRequest, context: grpc.aio.ServicerContext) -> peer_pb2.HelloResponse:
        self.old.relay(asked)
        return self.old.relay(peer_pb2.HelloResponse(identity=self.identity, protocol=1, backend="grpc"))

    async def Prefill(self, requests, context: grpc.aio.ServicerContext) -> None:
        async for message in requests:
            match (known := self.old.relay(message)).WhichOneof("event"):
                case "open":
                    self.opened.append(known.open)
                    first = encode_up(Done(first=Output(request_id="r", token_ids=(42,)), num_chunks=2))
                    await context.write(encode_up(Accepted(cached_tokens=0)))
                    await context.write(self.old.relay(first))
                case "grant":
                    for key, begin in (("a", 0), ("b", 4)):
                        await context.write(self.old.relay(encode_up(ready(key, begin, begin + 4))))


def test_a_hand_off_with_an_old_prefill_worker_over_the_wire() -> None:
    async def body() -> None:
        service, loop = OldPrefill(), asyncio.get_running_loop()
        server, address = await start_server(lambda s: peer_pb2_grpc.add_PeerServiceServicer_to_server(service, s))
        events: asyncio.Queue[FromPrefill] = asyncio.Queue()
        client = GrpcPeerClient(
            identity(),
            loop=loop,
            post=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
            config=FAST,
        )
        side, done = decode_side(CONFIG), list[act.DecodeAction]()

        def carry(actions: Sequence[act.DecodeAction]) -> None:
            for action in actions:
                done.append(action)
                match action:
                    case act.OpenStream():
                        client.open(action.peer, action.handoff, action.message)
                    case act.Send():
                        client.send(action.handoff, action.message)
                    case act.CloseStream():
                        client.close(action.handoff)
                    case act.PeerReady():
                        carry(side.on_reserved(action.request_id, loop.time()))
                    case act.Fetch():
                        carry(side.on_arrived(action.handoff, action.ready.key, loop.time()))

        carry(side.start(request(8, 4, loop.time() + 20.0), 0, (address,), loop.time()))
        while not any(isinstance(action, act.KVComplete) for action in done):
            event = await asyncio.wait_for(events.get(), 30.0)
            carry(side.on_message(event.handoff, event.message, loop.time()))
        kinds = [type(action) for action in done]
        assert kinds.count(act.PeerReady) == 1
        assert kinds.count(act.Import) == 2
        assert kinds.count(act.Recovered) == 0
        assert service.opened[0].request.prompt_token_ids == list(range(1, 9))
        assert side.is_idle
        await client.aclose()
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 2), 1), ((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2), ((2, 2), (1, 1), None), ((1, 1), (2, 3), None)],
)
def test_hello_settles_the_newest_protocol_both_know_or_names_it(ours, theirs, agreed) -> None:
    async def body() -> None:
        mine = identity(min_protocol=ours[0], max_protocol=ours[1])
        service = PeerServer(mine, post=lambda event: None, pieces=None, config=FAST)
        server, address = await start_server(lambda s: add_peer_service(service, s))
        asked = peer_pb2.HelloRequest(
            identity=encode_identity(identity(min_protocol=theirs[0], max_protocol=theirs[1], epoch="d"))
        )
        async with grpc.aio.insecure_channel(address) as channel:
            hello = peer_pb2_grpc.PeerServiceStub(channel).Hello(asked, timeout=30.0)
            if agreed is not None:
                assert (await hello).protocol == agreed
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await hello
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert f"protocol: wanted [{ours[0]}, {ours[1]}], got [{theirs[0]}, {theirs[1]}]" in refused.value.details()
        await server.stop(0)

    run_quiet(body())


def test_an_old_open_is_of_a_new_request_belongs_to_no_group_and_carries_no_trace() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = replace(request(3), fork_group="g", traceparent=trace)
    message = encode_down(Open(request=asked, held_tokens=2, backend="grpc", goes_on=True), epoch="e", now_s=0.0)
    opened = decode_down(OLD["first"].relay(message), 0.0)
    assert isinstance(opened, Open)
    assert opened.request == replace(asked, fork_group="", traceparent="")
    assert (opened.held_tokens, opened.backend, opened.goes_on) == (2, "grpc", False)
