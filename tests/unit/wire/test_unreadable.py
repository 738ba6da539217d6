"""A P that says what cannot be read: its stream ends, and nobody blames the request for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc.aio
import pytest

from jdisagg.api.peer.client import GrpcPeerClient
from jdisagg.api.peer.codec import decode_down, decode_up, encode_down, encode_up
from jdisagg.api.peer.identity_codec import encode_identity
from jdisagg.core.errors import HandoffLost, InvalidRequest, NumericalError, Overloaded
from jdisagg.core.logs import GRPC_SERVER_LOG, Garbled
from jdisagg.core.requests import FinishReason, Output, Provenance, TokenLogprob
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.identity import Incompatible
from jdisagg.handoff.ladder import is_final, is_unfit
from jdisagg.handoff.messages import Accepted, ChunkReady, Declined, Done, HandoffId, Open, Refused, StreamEnded, Want
from jdisagg.v1 import peer_pb2
from tests.unit.wire.peers import Prefill
from tests.unit.wire.rig import FAST, WAIT_LIMIT_S, identity, request, run_quiet, start_server, until

NO_PROTO = b"\xff\xff\xff"
FLAT = ChunkReady(key="k", begin=1, end=3, shape=(2, 2, 2, 8), dtype="float32", num_bytes=256, checksum=1)
H = HandoffId("r", 1)


def chunk(shape: Sequence[int] = FLAT.shape, **changes: str) -> bytes:
    """A chunk of that shape, which may have other than four axes."""
    message = encode_up(replace(FLAT, **changes))
    message.chunk_ready.shape[:] = shape
    return message.SerializeToString()


def scored(*scores: TokenLogprob) -> bytes:
    """A first token with these log-probabilities."""
    first = Output(request_id="r", token_ids=(7,), logprobs=scores)
    return encode_up(Done(first=first, num_chunks=1)).SerializeToString()


def counted(**counts: int) -> bytes:
    """A first token with a provenance of these counts."""
    first = Output(request_id="r", token_ids=(7,), provenance=Provenance(**counts))
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
        (chunk(shape=[2, 2]), "wanted shape"),
        (chunk(key="k" * 20 * 2**20), "a name of 20971520 characters"),
        (chunk(backend="a\0b"), r"printable ones at most: a\x00b"),
        (chunk(shape=[1] * 2**20), "got [1, 1, 1, 1, 1, 1, 1, 1]"),
        (scored(TokenLogprob(7, float("nan"), ())), "log-probability nan of token 7"),
        (scored(TokenLogprob(7, -1.0, ((8, float("inf")),))), "log-probability inf of token 8"),
        (scored(TokenLogprob(7, -1.0, ((-8, -1.0),))), "log-probability -1.0 of token -8"),
        (counted(borrowed_tokens=2**63 - 1), "Done with borrowed_tokens 9223372036854775807"),
        (counted(prefilled_tokens=-1), "Done with prefilled_tokens -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
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
        assert len(ended.error.message) < 1000
        ours = [record for record in caplog.records if record.name.startswith("jdisagg")]
        assert [record.getMessage() for record in ours if record.exc_info] == [], "it is no bug of ours"
        await client.aclose()
        await server.stop(0)

    run_quiet(body())


LONG = "full\0of\x1b[31m" + "x" * 20 * 2**20
SHOWN = r"full\x00of\x1b[31mxxx"


@pytest.mark.parametrize(
    "message",
    [
        Refused(error=Overloaded(LONG)),
        Refused(error=HandoffLost(LONG)),
        Done(first=Output(request_id="r", finish=FinishReason.ERROR, error=NumericalError(LONG)), num_chunks=0),
    ],
)
def test_what_a_prefill_worker_says_is_cut_and_made_printable_where_it_enters(message: Refused | Done) -> None:
    said = decode_up(encode_up(message))
    assert isinstance(said, Refused | Done)
    error = said.error if isinstance(said, Refused) else said.first.error
    assert error is not None
    assert error.message.startswith(SHOWN)
    assert len(error.message) < 600


def test_what_a_decode_worker_says_is_cut_and_made_printable_where_it_enters() -> None:
    for message in (Declined(reason=LONG), Want(begin=0, end=1, reason=LONG)):
        said = decode_down(encode_down(message, epoch="", now_s=0.0), 0.0)
        assert isinstance(said, Declined | Want)
        assert said.reason.startswith(SHOWN)
        assert len(said.reason) < 600
    opening = encode_down(Open(request=request(LONG), held_tokens=0, backend="grpc"), epoch="", now_s=0.0)
    with pytest.raises(InvalidRequest, match="request_id: got 20971532 characters"):
        decode_down(opening, 0.0)


def test_two_workers_that_do_not_pair_say_so_in_one_line() -> None:
    refusal = str(Incompatible("weights.embed", LONG, LONG, also=[LONG]))
    assert SHOWN in refusal
    assert len(refusal) < 2000


async def garble(address: str, method: str) -> None:
    """Send bytes that are no message."""
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/jdisagg.v1.PeerService/{method}")(NO_PROTO, timeout=WAIT_LIMIT_S)


def test_a_flood_of_bytes_that_are_no_message_is_one_line_without_a_stack(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        for method in ("Prefill", "Hello", "Fetch") * 5:
            await garble(address, method)
        await p.server.stop(0)

    server_log, garbled = logging.getLogger(GRPC_SERVER_LOG), Garbled()
    server_log.addFilter(garbled)
    try:
        run_quiet(body())
    finally:
        server_log.removeFilter(garbled)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "a message that cannot be read was refused" in line.getMessage()
    assert "[/jdisagg.v1.PeerService/Prefill]" in line.getMessage()
    assert line.exc_info is None
