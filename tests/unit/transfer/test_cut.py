"""Cutting and joining between meshes, and the checksum of what travels."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jdisagg.kv.group import KVGroup
from jdisagg.transfer import slabs
from jdisagg.transfer.cut import Cutter, Joiner, possible_parts, token_buckets
from jdisagg.transfer.head_mesh import HeadMesh
from jdisagg.transfer.slabs import slabs_of
from jdisagg.transfer.sums import PartSums, SumKind, sum_on_host
from jdisagg.transfer.target import PieceTarget
from tests.unit.transfer.rig import NP_DTYPES, sharding

L, T, K, F = 2, 32, 8, 4


def rows(seed: int = 0, features: int = F, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((L, T, K, features), np.float32).astype(NP_DTYPES[dtype])


def cut_on(tp: int, arrays: list[np.ndarray], num_parts: int, num_tokens: int = T) -> tuple[list[jax.Array], int]:
    placed = [jax.device_put(array, sharding(0, tp)) for array in arrays]
    return Cutter(placed, checksums=True).cut(placed, num_parts, num_tokens)


def test_parts_and_lengths_are_few_and_fit() -> None:
    assert token_buckets(256) == (16, 64, 256)
    assert token_buckets(4) == (1, 4)
    assert possible_parts(1, 8) == (1, 2, 4, 8)
    assert possible_parts(2, 6) == (2, 6)
    assert possible_parts(16, 16) == (16,)


@pytest.mark.covers("C02")
@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 4), (4, 1), (1, 8), (8, 2)])
def test_a_piece_with_scales_is_whole_again_on_every_mesh_and_the_checksums_agree(tp_p: int, tp_d: int) -> None:
    data, scales = rows(1, dtype="bfloat16"), rows(2, features=2)
    placed = [jax.device_put(array, sharding(0, tp_p)) for array in (data, scales)]
    cutter = Cutter(placed, checksums=True)
    joiner = Joiner([data.shape, scales.shape], [data.dtype, scales.dtype], sharding(0, tp_d))
    num_parts = cutter.num_parts(tp_d)
    assert num_parts == max(tp_p, tp_d)
    parts, sent = cutter.cut(placed, num_parts, 7)
    assert [part.shape for part in parts] == [(L, 8, K // num_parts, F)] * num_parts + [(L, 8, K // num_parts, 2)] * num_parts
    there = [
        jax.device_put(np.asarray(part), spec.sharding) for part, spec in zip(parts, joiner.specs(num_parts, 8), strict=True)
    ]
    joined, received = joiner.join(there, num_parts, 8, cutter.sum_kind)
    assert sent == received != 0
    for was, now in zip((data, scales), joined, strict=True):
        assert np.asarray(now)[:, :7].tobytes() == was[:, :7].tobytes()
        assert not np.asarray(now)[:, 7:].view(np.uint8).any(), "what lies behind the tokens is another request's"


@pytest.mark.covers("C02")
@pytest.mark.parametrize("copy_bytes", [1, 64, 300, 4096])
@pytest.mark.parametrize(("tp_p", "tp_d", "num_tokens"), [(1, 1, T), (1, 1, 7), (2, 4, T), (4, 1, 9)])
def test_a_piece_cut_into_slabs_is_whole_again_and_none_takes_two_copies(
    tp_p: int, tp_d: int, num_tokens: int, copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "COPY_BYTES", copy_bytes)
    data, scales = rows(1, dtype="bfloat16"), rows(2, features=2)
    placed = [jax.device_put(array, sharding(0, tp_p)) for array in (data, scales)]
    cutter = Cutter(placed, checksums=True)
    joiner = Joiner([data.shape, scales.shape], [data.dtype, scales.dtype], sharding(0, tp_d))
    num_parts, padded = cutter.num_parts(tp_d), cutter.padded(num_tokens)
    sent, checksum = cutter.cut(placed, num_parts, num_tokens)
    specs = joiner.specs(num_parts, padded)
    assert [(one.shape, one.dtype) for one in sent] == [(one.shape, one.dtype) for one in specs]
    row_bytes = K // num_parts * F * max(data.itemsize, scales.itemsize)
    assert max(one.nbytes for one in sent) <= max(copy_bytes, row_bytes), "a token of a layer is not cut"
    assert len(sent) > 2 * num_parts or copy_bytes == 4096
    there = [jax.device_put(np.asarray(one), spec.sharding) for one, spec in zip(sent, specs, strict=True)]
    joined, received = joiner.join(there, num_parts, padded, cutter.sum_kind)
    assert received == checksum != 0
    on_host = joiner.join_on_host([np.asarray(one) for one in sent], num_parts, padded)
    for was, now, host in zip((data, scales), joined, on_host, strict=True):
        assert np.asarray(now)[:, :num_tokens].tobytes() == was[:, :num_tokens].tobytes()
        assert not np.asarray(now)[:, num_tokens:].view(np.uint8).any()
        assert host[:, :num_tokens].tobytes() == was[:, :num_tokens].tobytes()


def test_slabs_are_as_few_and_as_alike_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "COPY_BYTES", 1000)
    assert [slab.layers for slab in slabs_of((10, 5, 2, 6), np.float32)] == [(0, 3), (3, 6), (6, 10)]  # at most 4 layers
    assert slabs_of((2, 50, 2, 6), np.float32) == [
        ((0, 1), (0, 16)),
        ((0, 1), (16, 33)),
        ((0, 1), (33, 50)),
        ((1, 2), (0, 16)),
        ((1, 2), (16, 33)),
        ((1, 2), (33, 50)),
    ]


def parts_of(tp: int, arrays: list[np.ndarray], num_parts: int) -> list[list[jax.Array]]:
    parts, _ = cut_on(tp, arrays, num_parts)
    return [parts[begin : begin + num_parts] for begin in range(0, len(parts), num_parts)]


def on_accelerator(tp: int) -> PartSums:
    """As it is where the parts' memory is not the host's."""
    sums = PartSums(HeadMesh(sharding(0, tp), (L, T, K, F)))
    assert sums.native is SumKind.HOST
    sums.native = SumKind.DEVICE
    return sums


def checksum(kind: SumKind, array: np.ndarray, num_parts: int = 1) -> int:
    return on_accelerator(1).of(parts_of(1, [array], num_parts), kind)


@pytest.mark.parametrize("kind", list(SumKind))
def test_a_checksum_of_either_kind_is_the_same_on_either_platform_and_mesh(kind: SumKind) -> None:
    for dtype in NP_DTYPES:
        arrays = [rows(3, dtype=dtype), rows(5, features=2)]
        parts = parts_of(2, arrays, 4)
        found = {
            on_accelerator(2).of(parts, kind),
            PartSums(HeadMesh(sharding(0, 2), (L, T, K, F))).of(parts, kind),
            PartSums(HeadMesh(sharding(0, 4), (L, T, K, F))).of(parts_of(4, arrays, 4), kind),
        }
        if kind is SumKind.NONE:
            assert found == {0}
        else:
            assert found == {sum_on_host([np.asarray(part) for of_array in parts for part in of_array], kind)} != {0}


@pytest.mark.parametrize("kind", [SumKind.HOST, SumKind.DEVICE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_flipped_bit_and_every_swap_changes_the_checksum(dtype: str, kind: SumKind) -> None:
    base = rows(4, dtype=dtype)
    was = checksum(kind, base)
    for bit in range(8 * base.dtype.itemsize):
        spoilt = base.copy()
        flat = spoilt.reshape(-1).view(np.uint8)
        flat[(37 * bit) // 8 * 8 + bit // 8] ^= np.uint8(1 << bit % 8)
        assert checksum(kind, spoilt) != was
    swapped = base.copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    assert checksum(kind, swapped) != was
    heads = base.copy()
    heads[:, :, [0, 1]] = heads[:, :, [1, 0]]
    assert checksum(kind, heads, 8) != checksum(kind, base, 8), "parts of the same bytes in another order"
    assert checksum(kind, np.zeros_like(base)) != 0


@pytest.mark.parametrize("tp", [1, 2])
def test_a_full_piece_between_like_meshes_is_copied_nowhere(tp: int) -> None:
    placed = [jax.device_put(rows(1), sharding(0, tp))]
    parts, _ = Cutter(placed, checksums=True).cut(placed, tp, T)
    assert [part.unsafe_buffer_pointer() for part in parts] == [
        shard.data.unsafe_buffer_pointer() for shard in placed[0].addressable_shards
    ]
    joiner = Joiner([(L, T, K, F)], [np.float32], sharding(0, tp))
    joined, _ = joiner.join(parts, tp, T, SumKind.HOST)
    target = PieceTarget(sharding=sharding(0, tp), dtype="float32", chunk_tokens=T, num_layers=L, num_kv_heads=K, features=F)
    arrived = target.place(KVGroup(*joined), alias=True)
    assert arrived.data.sharding == target.sharding
    assert [shard.data.unsafe_buffer_pointer() for shard in arrived.data.addressable_shards] == [
        part.unsafe_buffer_pointer() for part in parts
    ]
    copied = target.place(KVGroup(*joined))
    assert copied.data.addressable_shards[0].data.unsafe_buffer_pointer() != parts[0].unsafe_buffer_pointer()


def test_without_checksums_there_is_none() -> None:
    placed = [jax.device_put(rows(), sharding(0, 2))]
    assert Cutter(placed, checksums=False).cut(placed, 2, T)[1] == 0


def test_a_piece_on_other_devices_is_refused() -> None:
    cutter = Cutter([jax.device_put(rows(), sharding(0, 2))], checksums=True)
    with pytest.raises(ValueError, match="wanted"):
        cutter.cut([jax.device_put(rows(), sharding(4, 2))], 2, T)


@pytest.mark.parametrize("chunk_tokens", [1, 2, T])
def test_nothing_compiles_after_the_warm_up(chunk_tokens: int) -> None:
    example = [jax.device_put(rows()[:, :chunk_tokens], sharding(0, 2))]
    cutter = Cutter(example, checksums=True)
    joiner = Joiner([(L, chunk_tokens, K, F)], [np.float32], sharding(4, 4))
    num_buckets = len(token_buckets(chunk_tokens))
    assert cutter.warm_up() == num_buckets * len(possible_parts(2, K))
    assert joiner.warm_up() == num_buckets * len(possible_parts(4, K))
    compiled = cutter._cut._cache_size(), joiner._join._cache_size()
    for receiver in (1, 2, 3, 4, 8):
        for num_tokens in {1, min(2, chunk_tokens), min(9, chunk_tokens), chunk_tokens}:
            parts, _ = cutter.cut(example, cutter.num_parts(receiver), num_tokens)
            if receiver == 4:
                there = [
                    jax.device_put(np.asarray(p), s.sharding)
                    for p, s in zip(parts, joiner.specs(4, parts[0].shape[1]), strict=True)
                ]
                joiner.join(there, 4, cutter.padded(num_tokens), SumKind.HOST)
    assert (cutter._cut._cache_size(), joiner._join._cache_size()) == compiled
