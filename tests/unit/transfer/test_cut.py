"""Cutting and joining between meshes, and the checksum of what travels."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jdisagg.transfer.cut import Cutter, Joiner, combine, possible_parts, sums_on_host, token_buckets
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
    joiner = Joiner([data.shape, scales.shape], [data.dtype, scales.dtype], sharding(0, tp_d), checksums=True)
    num_parts = cutter.num_parts(tp_d)
    assert num_parts == max(tp_p, tp_d)
    parts, sent = cutter.cut(placed, num_parts, 7)
    assert [part.shape for part in parts] == [(L, 8, K // num_parts, F)] * num_parts + [(L, 8, K // num_parts, 2)] * num_parts
    there = [
        jax.device_put(np.asarray(part), spec.sharding) for part, spec in zip(parts, joiner.specs(num_parts, 8), strict=True)
    ]
    joined, received = joiner.join(there, num_parts)
    assert sent == received != 0
    for was, now in zip((data, scales), joined, strict=True):
        assert np.asarray(now)[:, :7].tobytes() == was[:, :7].tobytes()
        assert not np.asarray(now)[:, 7:].view(np.uint8).any(), "what lies behind the tokens is another request's"


def test_the_checksum_on_the_host_is_the_one_of_the_device() -> None:
    for dtype in NP_DTYPES:
        parts, checksum = cut_on(2, [rows(3, dtype=dtype)], 4)
        assert combine(sums_on_host([[np.asarray(part) for part in parts]])) == checksum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_flipped_bit_and_every_swap_changes_the_checksum(dtype: str) -> None:
    _, was = cut_on(1, [rows(4, dtype=dtype)], 1)
    base = rows(4, dtype=dtype)
    for bit in range(8 * base.dtype.itemsize):
        spoilt = base.copy()
        flat = spoilt.reshape(-1).view(np.uint8)
        flat[(37 * bit) // 8 * 8 + bit // 8] ^= np.uint8(1 << bit % 8)
        assert cut_on(1, [spoilt], 1)[1] != was
    swapped = base.copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    assert cut_on(1, [swapped], 1)[1] != was
    heads = base.copy()
    heads[:, :, [0, 1]] = heads[:, :, [1, 0]]
    assert cut_on(1, [heads], 8)[1] != cut_on(1, [base], 8)[1], "parts of the same bytes in another order"
    assert cut_on(1, [np.zeros_like(base)], 1)[1] != 0


def test_without_checksums_there_is_none() -> None:
    placed = [jax.device_put(rows(), sharding(0, 2))]
    assert Cutter(placed, checksums=False).cut(placed, 2, T)[1] == 0


def test_a_piece_on_other_devices_is_refused() -> None:
    cutter = Cutter([jax.device_put(rows(), sharding(0, 2))], checksums=True)
    with pytest.raises(ValueError, match="wanted"):
        cutter.cut([jax.device_put(rows(), sharding(4, 2))], 2, T)


def test_nothing_compiles_after_the_warm_up() -> None:
    example = [jax.device_put(rows(), sharding(0, 2))]
    cutter = Cutter(example, checksums=True)
    joiner = Joiner([(L, T, K, F)], [np.float32], sharding(4, 4), checksums=True)
    assert cutter.warm_up() == 3 * len(possible_parts(2, K))
    assert joiner.warm_up() == 3 * len(possible_parts(4, K))
    compiled = cutter._cut._cache_size(), joiner._join._cache_size()
    for receiver in (1, 2, 3, 4, 8):
        for num_tokens in (1, 2, 9, T):
            parts, _ = cutter.cut(example, cutter.num_parts(receiver), num_tokens)
            if receiver == 4:
                there = [
                    jax.device_put(np.asarray(p), s.sharding)
                    for p, s in zip(parts, joiner.specs(4, parts[0].shape[1]), strict=True)
                ]
                joiner.join(there, 4)
    assert (cutter._cut._cache_size(), joiner._join._cache_size()) == compiled
