"""int8 pieces through the backends: scales travel with their data, count as bytes, and are checked with them."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jdisagg.kv.quantise import dequantise
from jdisagg.transfer.base import Piece, PieceFailed
from tests.unit.transfer.rig import CHUNK_TOKENS, FEATURES, HEADS, LAYERS, Rig, sharding

NUM = 5
SCALE_BYTES = LAYERS * NUM * HEADS * 2 * 4


def int8_piece() -> tuple[Piece, np.ndarray, np.ndarray]:
    """A piece of NUM tokens with rubbish behind them, its data and its scales."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, CHUNK_TOKENS, HEADS, FEATURES)
    data = rng.integers(-127, 128, shape, np.int8)
    scales = rng.uniform(0.01, 1, (*shape[:-1], 2)).astype(np.float32)
    placed = jax.device_put((data, scales), sharding(0, 2))
    return Piece(begin=3, end=3 + NUM, data=placed[0], scales=placed[1]), data[:, :NUM], scales[:, :NUM]


@pytest.mark.covers("P09")
@pytest.mark.parametrize("kind", ["device_put", "grpc", "grpc-loopback", "fake"])
@pytest.mark.parametrize("kept_as", ["int8", "float32"])
def test_scales_arrive_with_their_data_or_are_multiplied_into_it(kind: str, kept_as: str) -> None:
    rig = Rig(kind).start(dtype=kept_as)
    sent, data, scales = int8_piece()
    ready = rig.published("k", sent)
    assert (ready.dtype, ready.num_bytes) == ("int8", data.nbytes + SCALE_BYTES)
    assert rig.publisher.num_buffered_bytes == ready.num_bytes
    got = rig.arrived(ready).piece
    assert all(array.sharding == sharding(4, 4) for array in got.arrays)
    if kept_as == "int8":
        assert np.asarray(got.data)[:, :NUM].tobytes() == data.tobytes()
        assert np.asarray(got.scales)[:, :NUM].tobytes() == scales.tobytes()
    else:
        assert got.scales is None
        assert np.asarray(got.data)[:, :NUM].tobytes() == dequantise(data, scales).tobytes()
    rig.publisher.discard("k")
    rig.close()


@pytest.mark.parametrize("kind", ["grpc", "fake"])
def test_a_spoilt_scale_fails_the_checksum_and_one_left_out_the_size(kind: str) -> None:
    rig = Rig(kind).start(dtype="int8")
    ready = rig.published("k", int8_piece()[0])
    stored = rig.store._bytes if kind == "grpc" else rig.network.pieces
    whole = bytes(stored["k"])
    stored["k"] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert rig.failed(ready).reason == "checksum"
    stored["k"] = whole[:-SCALE_BYTES]
    assert rig.failed(ready).reason == "truncated"
    failed = rig.failed(replace(ready, num_bytes=ready.num_bytes - SCALE_BYTES))
    assert isinstance(failed, PieceFailed)
    assert "bytes" in failed.detail
    rig.close()
