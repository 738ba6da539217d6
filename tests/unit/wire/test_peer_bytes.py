"""The bytes of a hand-off over gRPC: whole for who asks, and given up for who does not take them."""

from __future__ import annotations

import asyncio
import weakref
from time import monotonic

import grpc
import pytest

from jdisagg.api.channels import open_channel
from jdisagg.api.peer import piece_server
from jdisagg.api.peer.byte_source import GrpcByteSource
from jdisagg.api.peer.piece_server import NO_PREFILL, PieceServer, add_peer_service
from jdisagg.api.peer.piece_wire import FETCH
from jdisagg.handoff.messages import HandoffId
from jdisagg.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.reading import read_whole
from tests.unit.wire.peers import Decode, Prefill, opening
from tests.unit.wire.raw_http2 import HEADERS, RawCall
from tests.unit.wire.rig import identity, narrow_channel, run_quiet, start_server, until


class _Bytes(bytearray):
    """They can be seen to be freed."""


def test_fetch_streams_the_bytes_and_unknown_keys_answer_at_once():
    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        p.pieces["k"] = bytes(range(256)) * 12_345  # 3.01 MiB: not a whole number of parts
        p.pieces["empty"] = b""
        source = GrpcByteSource()

        def read(key: str, peer: str = address, left_s: float = 30.0) -> bytes:
            return read_whole(source, peer, key, monotonic() + left_s)

        assert await asyncio.to_thread(read, "k") == p.pieces["k"]
        assert await asyncio.to_thread(read, "empty") == b""
        with pytest.raises(KeyError, match="nope"):
            await asyncio.to_thread(read, "nope")
        with pytest.raises(KeyError):
            await asyncio.to_thread(read, "\1" * 20_000)  # longer than a status may be
        with pytest.raises(TimeoutError, match="its time was over"):  # asked, P might have served it
            await asyncio.to_thread(read, "k", address, -1.0)
        await p.server.stop(0)
        began_s = monotonic()
        with pytest.raises(ConnectionError, match=address):
            await asyncio.to_thread(read, "k", address, 60.0)
        assert monotonic() - began_s < 20.0
        await p.start(port=int(address.rpartition(":")[2]))
        assert await asyncio.to_thread(read, "k") == p.pieces["k"]  # a restarted peer is reached at once
        source.close()
        await p.server.stop(0)

    run_quiet(body())


def test_bytes_that_nobody_takes_are_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(piece_server, "STALL_TIMEOUT_S", 1.0, raising=False)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        piece = p.pieces["k"] = _Bytes(64 * 2**20)
        channel = narrow_channel(address)
        call = peer_pb2_grpc.PeerServiceStub(channel).Fetch(peer_pb2.FetchRequest(key="k"))
        await call.read()
        del p.pieces["k"]  # acknowledged, or its lease is over
        held = weakref.ref(piece)
        del piece
        assert held() is not None
        await until(lambda: held() is None)

        async def take_the_rest() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError, match="nothing was taken"):
            await take_the_rest()
        await channel.close()
        await p.server.stop(0)

    run_quiet(body())


def test_a_first_part_that_nobody_takes_is_given_up_and_its_status_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given_up: list[object] = []

    def end(context: object, code: grpc.StatusCode, details: str) -> None:
        given_up.append(code)
        end_call(context, code, details)

    end_call = piece_server.end_call
    monkeypatch.setattr(piece_server, "STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(piece_server, "end_call", end)

    async def body() -> None:
        p = Prefill(identity())
        address = await p.start()
        p.pieces["k"] = bytes(2**21)
        asked = peer_pb2.FetchRequest(key="k").SerializeToString()
        call = await RawCall.begin(address, FETCH, asked, window=2**16 - 1)
        try:
            async with asyncio.timeout(20):
                await call.until(HEADERS)
                await until(lambda: given_up == [grpc.StatusCode.DEADLINE_EXCEEDED])
                call.allow(2**24)
                assert await call.until(HEADERS, ends=True) < 2**20
        finally:
            call.close()
            await p.server.stop(0)

    run_quiet(body())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_who_takes_a_lender_for_a_prefill_worker_is_told_so_and_no_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A decode worker that calls itself, as its prefill worker advertises 127.0.0.1."""

    async def body() -> None:
        lender = PieceServer(None)
        server, address = await start_server(lambda server: add_peer_service(lender, server))
        d = Decode()
        d.client.open(address, HandoffId("r", 1), opening())
        await until(lambda: d.ends(HandoffId("r", 1)))
        ((_, why),) = d.client.failures().items()
        assert why.endswith(f"Hello: UNIMPLEMENTED: {NO_PREFILL}")
        assert "--advertise-host" in why
        stub = peer_pb2_grpc.PeerServiceStub(channel := open_channel(address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Prefill(iter([peer_pb2.PrefillRequest()])).read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, NO_PREFILL)
        await channel.close()
        await d.client.aclose()
        await server.stop(0)

    run_quiet(body())
    assert "Traceback" not in caplog.text
