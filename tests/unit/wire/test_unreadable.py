"""A P that says what cannot be read: its stream ends, and nobody blames the request for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from jdisagg.api.identity_codec import encode_identity
from jdisagg.api.peer_client import GrpcPeerClient
from jdisagg.api.peer_codec import encode_up
from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import Output, TokenLogprob
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.ladder import is_final, is_unfit
from jdisagg.handoff.messages import Accepted, ChunkReady, Done, HandoffId, Open, StreamEnded
from jdisagg.v1 import peer_pb2
from tests.unit.wire.rig import FAST, identity, request, run_quiet, start_server, until

NO_PROTO = b"\xff\xff\xff"
FLAT = ChunkReady(key="k", begin=1, end=3, shape=(2, 2, 2, 8), dtype="float32", num_bytes=256, checksum=1)
H = HandoffId("r", 1)


def flat_chunk() -> bytes:
    """A chunk whose shape has two axes."""
    message = encode_up(FLAT)
    del message.chunk_ready.shape[2:]
    return message.SerializeToString()


def scored(*scores: TokenLogprob) -> bytes:
    """A first token with these log-probabilities."""
    first = Output(request_id="r", token_ids=(7,), logprobs=scores)
    return encode_up(Done(first=first, num_chunks=1)).SerializeToString()


class RawPrefill:
    """A P that says Accepted, then what it is given, byte by byte as it is."""

    def __init__(self, *says: bytes) -> None:
        self._says = says

    async def hello(self, asked: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return peer_pb2.HelloResponse(identity=encode_identity(identity()), protocol=1, backend="grpc").SerializeToString()

    async def prefill(self, asked: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await anext(aiter(asked))
        for message in (encode_up(Accepted(cached_tokens=0)).SerializeToString(), *self._says):
            yield message
        async for _ in asked:
            pass

    def add(self, server: grpc.aio.Server) -> None:
        methods = {
            "Hello": grpc.unary_unary_rpc_method_handler(self.hello),
            "Prefill": grpc.stream_stream_rpc_method_handler(self.prefill),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("jdisagg.v1.PeerService", methods),))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (NO_PROTO, "cannot be read"),
        (flat_chunk(), "wanted shape"),
        (scored(TokenLogprob(7, float("nan"), ())), "log-probability nan of token 7"),
        (scored(TokenLogprob(7, -1.0, ((8, float("inf")),))), "log-probability inf of token 8"),
        (scored(TokenLogprob(7, -1.0, ((-8, -1.0),))), "log-probability -1.0 of token -8"),
    ],
)
def test_what_d_cannot_read_ends_the_hand_off_and_is_not_the_requests_fault(
    says: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        server, address = await start_server(RawPrefill(says).add)
        events: list[FromPrefill] = []
        client = GrpcPeerClient(identity(epoch="d"), loop=asyncio.get_running_loop(), post=events.append, config=FAST)
        client.open(address, H, Open(request=request("r"), held_tokens=1, backend="grpc"))
        await until(lambda: any(isinstance(event.message, StreamEnded) for event in events))
        ended = events[-1].message
        assert isinstance(ended, StreamEnded)
        assert isinstance(ended.error, HandoffLost)
        assert not is_final(ended.error)
        assert not is_unfit(ended.error)
        assert address in ended.error.message
        assert why in ended.error.message
        ours = [record for record in caplog.records if record.name.startswith("jdisagg")]
        assert [record.getMessage() for record in ours if record.exc_info] == [], "it is no bug of ours"
        await client.aclose()
        await server.stop(0)

    run_quiet(body())
