"""Slabs: what travels as one array. A part of a piece `[L, T, K, F]` is cut along layers, and where one layer is too much along
tokens, so that jax's transfer server moves each slab in one copy: see `jax_server.COPY_BYTES`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jdisagg.transfer.jax_server import COPY_BYTES

Shape = tuple[int, ...]  # of a part: [L, T, K, F]


class Slab(NamedTuple):
    """Layers and tokens of a part, both half open."""

    layers: tuple[int, int]
    tokens: tuple[int, int]

    def of(self, part: Any) -> Any:
        """This slab of an array."""
        return part[slice(*self.layers), slice(*self.tokens)]

    def shape(self, part: Shape) -> Shape:
        """Of this slab of a part."""
        return self.layers[1] - self.layers[0], self.tokens[1] - self.tokens[0], *part[2:]


def slabs_of(part: Shape, dtype: Any) -> list[Slab]:
    """The slabs of a part in order, alike in size; those of one run of layers follow each other."""
    layers, tokens, heads, features = part
    row_bytes = heads * features * np.dtype(dtype).itemsize
    tokens_at_once = max(1, COPY_BYTES // row_bytes)
    layers_at_once = max(1, tokens_at_once // tokens)
    return [Slab(layer, token) for layer in _runs(layers, layers_at_once) for token in _runs(tokens, tokens_at_once)]


def join_slabs(slabs: Sequence[Any], part: Shape, np_: Any) -> Any:
    """The part again, by numpy or jax.numpy; one that is a slab by itself is not copied."""
    if len(slabs) == 1:
        return slabs[0]
    num_token_runs = len({slab.tokens for slab in slabs_of(part, slabs[0].dtype)})
    runs = [slabs[begin : begin + num_token_runs] for begin in range(0, len(slabs), num_token_runs)]
    return np_.concatenate([run[0] if num_token_runs == 1 else np_.concatenate(run, axis=1) for run in runs], axis=0)


def _runs(total: int, most: int) -> list[tuple[int, int]]:
    """[0, total) in as few runs of at most `most` as there can be, alike in length."""
    num_runs = -(-total // most)
    ends = [total * index // num_runs for index in range(num_runs + 1)]
    return list(pairwise(ends))
