"""The static shapes of a worker: few, so that all are compiled before READY."""

from __future__ import annotations

from dataclasses import dataclass

EXACT_ROWS = 16  # R of the exact step; equal on all workers, since bits depend on it
EXACT_KEYS = 2**13  # that its page tables hold at least: beyond, kernels share out keys as finely however many there are
SCORE_ROWS = 64  # tokens of prompts that get log-probabilities in one call, whose logits exist at the same time
PREFILL_TILE = 16  # queries that share one page gather; prompts are padded to whole tiles
_MAX_PREFILL_BUCKETS = 4
_MAX_DECODE_BUCKETS = 4  # each takes about 3 CPU seconds to compile on first start
MAX_SAMPLING_ROWS = 16  # sequences that may end their prompt in one prefill step


@dataclass(frozen=True, order=True, slots=True)
class PrefillBucket:
    """Shape of one prefill executable."""

    num_tokens: int  # T, a multiple of PREFILL_TILE
    num_rows: int  # R, sequences that may sample

    @property
    def num_tiles(self) -> int:
        """N."""
        return self.num_tokens // PREFILL_TILE


def prefill_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[PrefillBucket, ...]:
    """Up to four sizes, each half of the next; the largest holds `max_num_batched_tokens`. One size for tiny set-ups."""
    sizes = [-(-max_num_batched_tokens // PREFILL_TILE) * PREFILL_TILE]
    while sizes[-1] > 4 * PREFILL_TILE and len(sizes) < _MAX_PREFILL_BUCKETS:
        sizes.append(-(-sizes[-1] // (2 * PREFILL_TILE)) * PREFILL_TILE)
    return tuple(PrefillBucket(size, min(size // PREFILL_TILE, max_num_seqs, MAX_SAMPLING_ROWS)) for size in sorted(set(sizes)))


def decode_buckets(max_num_seqs: int, *, least: int = 1) -> tuple[int, ...]:
    """Up to four row counts: `least`, powers of four (or of eight, ...) above it, and `max_num_seqs` itself. One size for tiny
    set-ups."""
    if max_num_seqs <= 4:
        return (max(max_num_seqs, least),)
    factor = 4
    while True:
        sizes = {least, max_num_seqs} | {factor**power for power in range(10) if least < factor**power < max_num_seqs}
        if len(sizes) <= _MAX_DECODE_BUCKETS:
            return tuple(sorted(sizes))
        factor *= 2
