"""From a plan's chunks and decode rows to the NumPy batches of one or more device steps.

A prompt chunk becomes tiles of PREFILL_TILE tokens; when the tiles of a plan exceed the largest bucket, or more sequences
end than it has rows, the plan becomes several steps. In `exact`, decode rows and prompt tokens share tiles of EXACT_ROWS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdisagg.engine.batches import ExactBatch, PrefillBatch
from jdisagg.engine.buckets import EXACT_ROWS, PREFILL_TILE, SCORE_ROWS, PrefillBucket
from jdisagg.sched.plan import PrefillChunk


@dataclass(frozen=True, slots=True)
class Targets:
    """Where one chunk's prompt log-probabilities are found: rows of what the step scored, `num_top` alternatives each."""

    slot: int
    rows: tuple[int, ...]
    token_ids: tuple[int, ...]  # whose they are, one per row
    num_top: int


@dataclass(frozen=True, slots=True)
class Packed:
    """One device step: its batch, which row samples for which slot, and prompt log-probabilities to read."""

    batch: Any  # PrefillBatch | ExactBatch of NumPy arrays, or the slots of a decode step
    samples: tuple[tuple[int, int], ...]  # (row, slot)
    targets: tuple[Targets, ...] = ()
    to_score: tuple[np.ndarray, ...] = ()  # of a prefill step, each i32[2, S]: its token, and the prompt's next one


@dataclass(frozen=True, slots=True)
class _Tile:
    chunk: PrefillChunk
    begin: int  # into the chunk
    end: int

    @property
    def samples(self) -> bool:
        return self.chunk.samples and self.end == len(self.chunk.token_ids)


def pack_prefill(chunks: Sequence[PrefillChunk], buckets: tuple[PrefillBucket, ...], dummy_slot: int) -> Iterator[Packed]:
    """Cut the chunks into steps, each of the smallest bucket that holds it."""
    tiles = [
        _Tile(chunk, begin, min(begin + PREFILL_TILE, len(chunk.token_ids)))
        for chunk in chunks
        for begin in range(0, len(chunk.token_ids), PREFILL_TILE)
    ]
    while tiles:
        largest = buckets[-1]
        taken, rows = 0, 0
        while taken < min(len(tiles), largest.num_tiles) and rows + tiles[taken].samples <= largest.num_rows:
            rows += tiles[taken].samples
            taken += 1
        step, tiles = tiles[:taken], tiles[taken:]
        bucket = next(b for b in buckets if b.num_tiles >= len(step) and b.num_rows >= rows)
        yield _prefill_step(step, bucket, dummy_slot)


def _prefill_step(tiles: Sequence[_Tile], bucket: PrefillBucket, dummy_slot: int) -> Packed:
    batch = empty_prefill(bucket, dummy_slot)
    samples: list[tuple[int, int]] = []
    targets: list[Targets] = []
    scored: list[tuple[int, int]] = []
    for number, tile in enumerate(tiles):
        chunk, first, count = tile.chunk, number * PREFILL_TILE, tile.end - tile.begin
        batch.tile_slots[number] = chunk.slot
        batch.token_ids[first : first + count] = chunk.token_ids[tile.begin : tile.end]
        batch.positions[first : first + count] = np.arange(chunk.start + tile.begin, chunk.start + tile.end)
        if tile.samples:
            batch.sample_tokens[len(samples)] = first + count - 1
            batch.sample_slots[len(samples)] = chunk.slot
            samples.append((len(samples), chunk.slot))
        if chunk.targets is not None and (part := chunk.targets[tile.begin : tile.end]):
            targets.append(Targets(chunk.slot, tuple(range(len(scored), len(scored) + len(part))), part, chunk.num_top))
            scored.extend(enumerate(part, start=first))
    return Packed(batch, tuple(samples), tuple(targets), tuple(_pieces(scored)))


def _pieces(scored: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
    for first in range(0, len(scored), SCORE_ROWS):
        pairs = scored[first : first + SCORE_ROWS]
        piece = empty_score()
        piece[:, : len(pairs)] = np.transpose(pairs)
        yield piece


def empty_score() -> np.ndarray:
    """i32[2, S] of padding, fresh and writable."""
    return np.zeros((2, SCORE_ROWS), np.int32)


def empty_prefill(bucket: PrefillBucket, dummy_slot: int) -> PrefillBatch:
    """A batch of padding, in fresh writable NumPy arrays (the runtime may alias them)."""
    arrays: dict[str, Any] = {
        "token_ids": np.zeros(bucket.num_tokens, np.int32),
        "positions": np.full(bucket.num_tokens, -1, np.int32),
        "tile_slots": np.full(bucket.num_tiles, dummy_slot, np.int32),
        "sample_tokens": np.zeros(bucket.num_rows, np.int32),
        "sample_slots": np.full(bucket.num_rows, dummy_slot, np.int32),
    }
    return PrefillBatch(**arrays)


@dataclass(frozen=True, slots=True)
class _Row:
    slot: int
    token: int
    position: int
    decodes: bool
    samples: bool
    target: int
    num_top: int


def pack_exact(chunks: Sequence[PrefillChunk], decode: Sequence[int], dummy_slot: int) -> Iterator[Packed]:
    """Decode rows first, then the prompts' tokens in order, R to a step."""
    rows = [_Row(slot, 0, 0, True, True, -1, 0) for slot in decode]
    for chunk in chunks:
        last = len(chunk.token_ids) - 1
        targets = chunk.targets or ()
        for index, token in enumerate(chunk.token_ids):
            target = targets[index] if index < len(targets) else -1
            sampled = chunk.samples and index == last
            rows.append(_Row(chunk.slot, token, chunk.start + index, False, sampled, target, chunk.num_top))
    for first in range(0, len(rows), EXACT_ROWS):
        yield _exact_step(rows[first : first + EXACT_ROWS], dummy_slot)


def _exact_step(rows: Sequence[_Row], dummy_slot: int) -> Packed:
    batch = empty_exact(dummy_slot)
    for number, row in enumerate(rows):
        batch.slots[number] = row.slot
        batch.token_ids[number] = row.token
        batch.positions[number] = row.position
        batch.decodes[number] = row.decodes
        batch.samples[number] = row.samples
        batch.targets[number] = row.target
    samples = tuple((number, row.slot) for number, row in enumerate(rows) if row.samples)
    scored = [(number, row) for number, row in enumerate(rows) if row.target >= 0]
    targets = tuple(Targets(row.slot, (number,), (row.target,), row.num_top) for number, row in scored)
    return Packed(batch, samples, targets)


def empty_exact(dummy_slot: int) -> ExactBatch:
    """A batch of padding, in fresh writable NumPy arrays."""
    arrays: dict[str, Any] = {
        "token_ids": np.zeros(EXACT_ROWS, np.int32),
        "positions": np.full(EXACT_ROWS, -1, np.int32),
        "slots": np.full(EXACT_ROWS, dummy_slot, np.int32),
        "decodes": np.zeros(EXACT_ROWS, bool),
        "samples": np.zeros(EXACT_ROWS, bool),
        "targets": np.full(EXACT_ROWS, -1, np.int32),
    }
    return ExactBatch(**arrays)
