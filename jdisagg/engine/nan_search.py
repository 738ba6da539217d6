"""Where a sequence's KV first holds infinity or NaN. Asked only once a step's logits held it, so a healthy tick pays nothing.

What a layer adds to the residual stream shows in the keys and values of the layer above, so the lowest layer whose KV is bad
bounds the search: its own projections when only keys or only values are bad, else whatever feeds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.engine.token_index import spans
from jdisagg.sched.plan import PageTable
from jdisagg.transfer.base import Piece

log = logging.getLogger(__name__)

MAX_CHUNKS = 8  # read per search: the engine waits meanwhile (a chunk of 256 tokens of an 8B model is 32 MB, about 10 ms)
AFTER_THE_LAYERS = "the last layer's output, the final norm or the output head"


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    """Orders by layer, then by token."""

    layer: int
    token: int
    part: str


@dataclass(frozen=True, slots=True)
class NanSearch:
    """Looks through KV by `export` (`Runner.export_tokens`, at most `chunk_tokens` at a time). On the engine thread."""

    export: Callable[[PageTable, int, int], Piece]
    chunk_tokens: int

    def __call__(self, page_table: PageTable, num_tokens: int) -> str:
        """Where tokens [0, num_tokens) of `page_table` first hold infinity or NaN, in words. Never raises: a device that
        refuses the export is logged, and the request fails without the place."""
        try:
            return self._describe(page_table, num_tokens)
        except Exception:
            log.exception("the search for infinity or NaN in the KV of %d tokens failed", num_tokens)
            return "its KV could not be searched, see the log"

    def _describe(self, page_table: PageTable, num_tokens: int) -> str:
        ranges, num_layers, first = _looked_at(num_tokens, self.chunk_tokens), 0, None
        for begin, end in ranges:
            kv = _floats(self.export(page_table, begin, end))[:, : end - begin]
            num_layers = len(kv)
            found = _first(kv, begin)
            first = min((place for place in (first, found) if place is not None), default=None)
            if first is not None and first.layer == 0:
                break  # nothing later can come before it
        skipped = "" if _whole(ranges) else f" (tokens [{ranges[-2][1]}, {ranges[-1][0]}) were not looked at)"
        if first is None:
            return f"in none of the {num_layers} layers' KV: {AFTER_THE_LAYERS}{skipped}"
        return f"first in layer {first.layer}'s {first.part} of token {first.token}{skipped}"


def _looked_at(num_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Token ranges to read: all, or the first ones and the last, where the step failed."""
    every = spans(num_tokens, chunk_tokens)
    return every if len(every) <= MAX_CHUNKS else [*every[: MAX_CHUNKS - 1], every[-1]]


def _whole(ranges: list[tuple[int, int]]) -> bool:
    return len(ranges) < 2 or ranges[-2][1] == ranges[-1][0]


def _floats(piece: Piece) -> np.ndarray:
    """What may hold such: the data, or the scales of int8 data; both are keys, then values, on the last axis."""
    return np.asarray(jax.device_get(piece.arrays[-1]))


def _first(kv: np.ndarray, begin: int) -> _Found | None:
    """The lowest bad layer of KV [L, T, K, F or 2] (keys, then values) and its first bad token, counted from `begin`."""
    bad = np.asarray(~np.isfinite(kv).all(axis=2))  # bool[L, T, F]
    layers = np.flatnonzero(bad.any(axis=(1, 2)))
    if not len(layers):
        return None
    token = int(np.argmax(bad[layers[0]].any(axis=1)))
    keys, values = (bool(half.any()) for half in np.split(bad[layers[0], token], 2))
    part = "keys and values" if keys and values else "keys" if keys else "values"
    return _Found(int(layers[0]), begin + token, part)
