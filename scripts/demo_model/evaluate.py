"""Bits per byte on held-out modules, beside gzip and xz."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from eval_tasks.tasks import WINDOW, windows
from tokenizers import Tokenizer

from demo_model.corpus import Module
from demo_model.net import Params, Shape, token_nats
from demo_model.tokens import BOS_ID

Score = Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # token_nats of a shape and dtype


@dataclass(frozen=True)
class Scores:
    """Bits per byte of the whole held-out set; context and compressors start afresh at every file."""

    files: int
    num_bytes: int
    num_tokens: int
    bits_per_byte: float
    gzip: float
    xz: float


def held_out_scores(params: Params, shape: Shape, tokenizer: Tokenizer, modules: Sequence[Module]) -> Scores:
    """Score the modules with float32 arithmetic."""
    nats, tokens, size, gz, xz = 0.0, 0, 0, 0, 0
    score = jax.jit(partial(token_nats, shape=shape, dtype=jnp.dtype(jnp.float32)))
    for module in modules:
        raw = module.text.encode()
        ids = tokenizer.encode(module.text, add_special_tokens=False).ids
        size, tokens = size + len(raw), tokens + len(ids)
        gz, xz = gz + len(gzip.compress(raw, 9)), xz + len(lzma.compress(raw, preset=9))
        nats += sum(_window_nats(score, params, window) for window in windows((BOS_ID, *ids), WINDOW + 1))
    bits = nats / math.log(2)
    return Scores(len(modules), size, tokens, bits / size, 8 * gz / size, 8 * xz / size)


def task_texts(path: Path) -> list[Module]:
    """The texts of a perplexity task file, which do not change with the interpreter."""
    examples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Module(example["id"], example["text"]) for example in examples]


def _window_nats(score: Score, params: Params, window: tuple[tuple[int, ...], int]) -> float:
    ids, counted = window
    tokens = np.zeros((1, WINDOW + 1), np.int32)
    segments = np.ones((1, WINDOW + 1), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 0
    nats, _ = score(params, jnp.asarray(tokens), jnp.asarray(segments))
    return float(np.asarray(nats[0], np.float64)[len(ids) - 1 - counted : len(ids) - 1].sum())
