"""Device inputs of the steps, built by the host in NumPy. T = N * t tokens, N tiles, R rows; position -1 is padding."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts, cut into tiles."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    tile_slots: jax.Array  # i32[N]
    sample_tokens: jax.Array  # i32[R]; index into T of the last token of a sequence that samples
    sample_slots: jax.Array  # i32[R]; padded with the dummy slot


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExactBatch:
    """R tokens, prompt or generated, each a row of its own."""

    token_ids: jax.Array  # i32[R]; ignored where `decodes`
    positions: jax.Array  # i32[R]; ignored where `decodes`
    slots: jax.Array  # i32[R]; padded with the dummy slot
    decodes: jax.Array  # bool[R]; token and position come from the slot's state
    samples: jax.Array  # bool[R]
    targets: jax.Array  # i32[R]; token whose log-probability is wanted after this one; -1 = none
