"""Any tensor parallelism, page size and KV dtype on one side against any on the other, compared byte by byte.

Two sides meet in the bytes on the wire. So every P must make the same bytes and announcement of the same tokens, which every
D must take in: that is all pairs, at the price of the sum of both.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest

from jdisagg.handoff.messages import ChunkReady
from jdisagg.kv.group import KVGroup
from jdisagg.transfer.convert import NP_DTYPES
from jdisagg.transfer.target import announce, checksum_of, pack
from tests.unit.transfer.reshape_ends import CHUNK, DTYPES, FEATURES, HEADS, LAYERS, PAGE_SIZES, TPS, End, random_rows

RANGES = ((3, 3 + CHUNK), (3 + CHUNK, 30), (33, 34), (38, 40))  # whole, part of a piece, one token, the last ones; with gaps


def cut(rows: KVGroup, begin: int, end: int) -> KVGroup:
    return KVGroup(*(array[:, begin:end] for array in rows.arrays))


def wire(rows: KVGroup, dtype: str, begin: int, end: int) -> tuple[bytes, ChunkReady]:
    """What the format says travels for tokens [begin, end)."""
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in cut(rows, begin, end).arrays)
    shape = (LAYERS, end - begin, rows.data.shape[2], FEATURES)
    return data, ChunkReady(
        key="k", begin=begin, end=end, shape=shape, dtype=dtype, num_bytes=len(data), checksum=checksum_of(data)
    )


def converted(rows: KVGroup, dtype: str) -> KVGroup:
    """What D must hold: the nearest value of its dtype; int8 is checked by its stated error and taken as it is."""
    if rows.data.dtype == NP_DTYPES[dtype]:
        return rows
    values = rows.data.astype(np.float64)
    if rows.scales is not None:
        values = np.float64(np.float32(values * np.repeat(rows.scales, FEATURES // 2, axis=-1).astype(np.float64)))
    if dtype == "float16":
        values = np.clip(values, -65504, 65504)
    if dtype != "int8":
        return KVGroup(values.astype(np.float32).astype(NP_DTYPES[dtype]))
    halves = values.reshape(*values.shape[:-1], 2, FEATURES // 2)
    largest = np.abs(halves).max(axis=-1)
    scales = np.maximum(largest, 127 * 2.0**-126).astype(np.float32) * np.float32(1 / 127)
    data = np.rint(halves.astype(np.float32) * (np.float32(1) / scales)[..., None])
    assert (np.abs(data * scales[..., None].astype(np.float64) - halves) <= largest[..., None] / 254 * (1 + 1e-5)).all()
    return KVGroup(data.reshape(values.shape).astype(np.int8), scales)


def check_exports(end: End, rows: dict[str, KVGroup]) -> int:
    """Every pool of P makes the format's bytes and announcement."""
    canvases = []
    for number, ((_, dtype), pool) in enumerate(end.pools.items()):
        canvases.append(pool.canvas(end.num_pages, number))
        pool.paint(canvases[-1], rows[dtype], 0)
    end.fill(canvases)
    for begin, stop in RANGES:
        for (page_size, dtype), piece in zip(end.pools, end.export(begin, stop), strict=True):
            data, ready = wire(rows[dtype], dtype, begin, stop)
            got = pack(piece)
            assert got == data, f"pages of {page_size}, {dtype}, [{begin}, {stop})"
            assert announce("k", piece, checksum_of(got)) == ready
    return len(end.pools)


def check_imports(end: End, rows: KVGroup, sent_as: str) -> int:
    """Every pool of D holds the tokens in its own dtype afterwards, and outside of them what it held before."""
    canvases = [pool.canvas(end.num_pages, number) for number, pool in enumerate(end.pools.values())]
    end.fill(canvases)
    wanted = {dtype: converted(rows, dtype) for dtype in DTYPES}
    for begin, stop in RANGES:
        data, ready = wire(rows, sent_as, begin, stop)
        placed = {}
        for dtype in DTYPES:
            target = end.target(dtype)
            target.check(ready)
            placed[dtype] = target.arrived(ready, target.unpack(data, ready))
            assert placed[dtype].data.sharding == end.piece_sharding
        end.take_in([placed[dtype] for _, dtype in end.pools])
        for (_, dtype), pool, canvas in zip(end.pools, end.pools.values(), canvases, strict=True):
            pool.paint(canvas, cut(wanted[dtype], begin, stop), begin)
    for (page_size, dtype), group, canvas in zip(end.pools, end.read(), canvases, strict=True):
        for got, painted in zip(group.arrays, canvas.arrays, strict=True):
            same = got[:, 1:].tobytes() == painted[:, 1:].tobytes()  # page 0, the null page, takes the padding
            assert same, f"{sent_as} into pages of {page_size} in {dtype}"
    return len(end.pools)


@pytest.mark.timeout(900)
@pytest.mark.covers("D12", "C02")
def test_every_tp_page_size_and_dtype_of_p_meets_every_one_of_d() -> None:
    started_s, exports, imports = time.monotonic(), 0, 0
    for heads in HEADS:
        rows = {dtype: random_rows(heads, heads, dtype) for dtype in DTYPES}
        for tp in TPS:
            end = End(tp, heads)
            exports += check_exports(end, rows)
            imports += sum(check_imports(end, rows[dtype], dtype) for dtype in DTYPES)
    pairs = len(HEADS) * len(list(product(TPS, TPS, PAGE_SIZES, PAGE_SIZES, DTYPES, DTYPES)))
    print(f"\n{pairs} pairs: {exports} exporting and {imports} importing pools, {time.monotonic() - started_s:.0f} s")
    assert (exports, imports) == (16 * 24, 16 * 24 * 4)
    assert pairs == 36_864
