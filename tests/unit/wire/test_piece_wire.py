"""Parts of pieces are what protobuf would write and read, whoever of the two does which."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.api.peer.piece_wire import FETCH, decode_part, encode_part
from jdisagg.v1 import peer_pb2, peer_pb2_grpc

SIZES = (1, 2, 127, 128, 129, 16383, 16384, 2**20, 2**21 - 1, 2**21)


@pytest.mark.parametrize("size", SIZES)
def test_every_length_of_length(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    message = encode_part(memoryview(data)[:size])
    assert message == peer_pb2.FetchResponse(data=data[:size]).SerializeToString()
    assert decode_part(message) == data[:size]


@given(st.binary(max_size=300))
def test_protobuf_reads_what_we_write_and_we_read_what_it_writes(data: bytes) -> None:
    assert peer_pb2.FetchResponse.FromString(encode_part(memoryview(data))).data == data
    assert decode_part(peer_pb2.FetchResponse(data=data).SerializeToString()) == data


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them(message: bytes) -> None:
    try:
        wanted = peer_pb2.FetchResponse.FromString(message).data
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_part(message)
        return
    assert decode_part(message) == wanted


def test_fields_of_a_newer_version_are_passed_over() -> None:
    newer = encode_part(memoryview(b"data")) + b"\x10\x07"  # field 2, a varint
    assert decode_part(newer) == b"data"
    assert decode_part(b"\x10\x07" + encode_part(memoryview(b"data"))) == b"data"


def test_the_path_is_that_of_the_service() -> None:
    asked = []

    class Channel:
        def __getattr__(self, kind: str) -> object:
            return lambda path, **_: asked.append(path)

    peer_pb2_grpc.PeerServiceStub(Channel())  # type: ignore[arg-type]
    assert FETCH in asked
