"""Random token ranges between real runners that are unlike in everything, cut anywhere, out of order, compared byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.engine.compiles import CompileCounter
from jdisagg.engine.device import Device, DeviceShape
from jdisagg.engine.runner import ModelRunner, RunnerShape
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from jdisagg.transfer.base import Piece
from jdisagg.transfer.target import PieceTarget, announce, checksum_of, num_bytes_of, pack
from tests.unit.transfer.reshape_ends import FEATURES, LAYERS, Pool, random_rows
from tests.unit.transfer.test_reshape import converted, cut

HEADS, NUM_PAGES, TOKENS = 2, 12, 40
NO_MODEL = RunnerShape(prefill=(), decode=(), exact=False, max_model_len=TOKENS)
ENDS = (  # tp, page size, dtype, chunk
    (1, 8, "float32", 7),
    (2, 16, "bfloat16", 16),
    (4, 4, "int8", 9),
    (8, 64, "float16", 40),
    (2, 5, "int8", 16),
    (8, 8, "float32", 12),
)


@cache
def runner(number: int) -> ModelRunner:
    """A runner whose steps are never run; export and import are compiled."""
    tp, page_size, dtype, chunk = ENDS[number]
    spec = KVSpec(num_layers=LAYERS, num_kv_heads=HEADS, features=FEATURES, dtype=dtype)
    mesh = make_mesh(jax.devices("cpu"), tp)
    shape = DeviceShape(max_num_seqs=1, pages_per_seq=1, vocab_size=1, chunk_tokens=chunk, prefill_tokens=0)
    device = Device(cast(Any, None), {}, choose_layout(spec, mesh, page_size), mesh, shape, num_pages=NUM_PAGES)
    ready = ModelRunner(device, NO_MODEL)
    ready.import_tokens(((1,),), ready.export_tokens(((1,),), 0, 1))
    return ready


@dataclass
class Side:
    """A runner, where its sequence lies, and what its pool should hold."""

    runner: ModelRunner
    pool: Pool
    canvas: KVGroup

    @classmethod
    def of(cls, number: int, rng: np.random.Generator) -> Side:
        """A pool full of random bytes and a shuffled page table."""
        device = runner(number).device
        pages = 1 + rng.permutation(NUM_PAGES - 1)[: -(-TOKENS // device.layout.page_size)]
        side = cls(runner(number), Pool(device.layout, tuple(pages.tolist())), KVGroup(None))
        side.canvas = side.pool.canvas(NUM_PAGES, int(rng.integers(2**31)))
        side.load()
        return side

    def load(self) -> None:
        """Put the canvas into the pool."""
        pool = self.runner.device.pool
        pool.take()
        pool.put((jax.device_put(jax.tree.map(np.copy, self.canvas), pool.shardings[0]),))

    def read(self) -> KVGroup:
        """What the pool holds."""
        (group,) = self.runner.device.pool.take()
        self.runner.device.pool.put((group,))
        return jax.device_get(group)

    @property
    def table(self) -> tuple[tuple[int, ...]]:
        """As a plan has it."""
        return (self.pool.pages,)


def ranges(data: st.DataObject, longest: int) -> list[tuple[int, int]]:
    """Pieces of [held, length), each at most `longest` tokens, in any order; none when all is held."""
    length = data.draw(st.integers(1, TOKENS), label="length")
    at, spans = data.draw(st.integers(0, length), label="held"), []
    while at < length:
        stop = min(length, at + data.draw(st.integers(1, longest), label="piece"))
        spans.append((at, stop))
        at = stop
    return data.draw(st.permutations(spans), label="order")


@pytest.mark.covers("C02", "D12", "I-8")
@given(data=st.data(), sender=st.integers(0, 5), receiver=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_random_pieces_reassemble_and_touch_nothing_else(data: st.DataObject, sender: int, receiver: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in (sender, receiver):
        runner(number)
    compiles, spec = CompileCounter(), runner(receiver).device.layout.spec
    compiled = compiles.count
    rows = random_rows(seed, HEADS, ENDS[sender][2])
    p, d = Side.of(sender, rng), Side.of(receiver, rng)
    if sender == receiver:  # one pool cannot be both: what P sends is read out first
        d.canvas = jax.tree.map(np.copy, p.canvas)
    p.pool.paint(p.canvas, rows, 0)
    p.load()
    target = PieceTarget.of(spec, d.runner.device.piece_sharding, d.runner.chunk_tokens)
    spans = ranges(data, min(p.runner.chunk_tokens, d.runner.chunk_tokens))
    sent: list[tuple[Piece, bytes]] = []
    for begin, end in spans:
        piece = p.runner.export_tokens(p.table, begin, end)
        sent.append((piece, pack(piece)))
        assert len(sent[-1][1]) == num_bytes_of(piece) == (end - begin) * p.pool.layout.spec.bytes_per_token
    d.load()
    wanted = converted(rows, spec.dtype)
    for piece, message in sent:
        ready = announce("k", piece, checksum_of(message))
        target.check(ready)
        d.runner.import_tokens(d.table, target.arrived(ready, target.unpack(message, ready)))
        d.pool.paint(d.canvas, cut(wanted, piece.begin, piece.end), piece.begin)
    for got, painted in zip(d.read().arrays, d.canvas.arrays, strict=True):
        assert got[:, 1:].tobytes() == painted[:, 1:].tobytes()  # page 0, the null page, takes the padding
    assert compiles.count == compiled
