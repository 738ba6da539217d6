"""From logits to tokens on the device. Rows are independent: a row's token never depends on what its neighbours asked for.

logits -> bias -> penalties -> stop ids masked (min_tokens) -> what the grammar forbids masked -> temperature
       -> min-p, top-k, top-p -> Gumbel-max
       -> log-probabilities of the model's own distribution

Work that no row of the batch asked for is skipped by `lax.cond`; for a row that did not ask, each stage is the identity. With
a vocabulary of 128k each skipped stage would still copy 8 MB for 16 rows: so plain greedy rows pass all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.core.requests import MAX_LOGPROBS
from jdisagg.engine.filters import keep_mask, ordered
from jdisagg.engine.noise import gumbel
from jdisagg.engine.state import PROMPT_BIT, DecodeState, SamplingRows

_LEAST_TEMPERATURE = 1e-30  # colder is the same draw, and logits divided by it would no longer be finite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities (nats) before any sampling parameter; zeros when nobody wanted them."""

    chosen: jax.Array  # f32[R]
    top_ids: jax.Array  # i32[R, min(MAX_LOGPROBS, V)]; best first, ties by id
    top: jax.Array  # f32[R, min(MAX_LOGPROBS, V)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """One token per row."""

    tokens: jax.Array  # i32[R]
    bad: jax.Array  # bool[R]; the logits hold NaN or +inf: log-probabilities of such are NaN
    logprobs: Logprobs


def sample(logits: jax.Array, state: DecodeState, rows: SamplingRows, positions: jax.Array) -> Sampling:
    """Sample the token at index `positions` i32[R] of each row's sequence from logits f32[R, V]."""
    with jax.named_scope("sample"):
        changed = rows.shaped | rows.constrained | (positions < rows.min_length)
        drawn = rows.temperature > 0.0

        def chosen() -> jax.Array:
            scores = lax.cond(jnp.any(changed), lambda: _change(logits, state, rows, positions), lambda: logits)
            greedy = _most_likely(scores)
            return lax.cond(jnp.any(drawn), lambda: jnp.where(drawn, _draw(scores, rows, positions), greedy), lambda: greedy)

        tokens = lax.cond(jnp.any(changed | drawn), chosen, lambda: _most_likely(logits))
        return Sampling(
            tokens=tokens,
            bad=~(logits < jnp.inf).all(axis=-1),
            logprobs=score_if(jnp.any(rows.num_top >= 0), logits, tokens),
        )


def score(logits: jax.Array, chosen: jax.Array) -> Logprobs:
    """Log-probabilities of tokens `chosen` i32[R] and of the most likely ones under logits f32[R, V]; all NaN in a row whose
    logits hold NaN or +inf."""
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(total < jnp.inf, total, jnp.nan)
    top, top_ids = lax.platform_dependent(logits, cuda=_best, default=_sorted)
    picked = jnp.take_along_axis(logits, chosen[:, None], axis=-1)[:, 0]
    return Logprobs(chosen=picked - total, top_ids=top_ids.astype(jnp.int32), top=top - total[:, None])


def _sorted(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    top, top_ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return top, top_ids


def _best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, one after the other: XLA:GPU sorts the vocabulary instead, in a call that no CUDA graph can hold, so that the
    host would wait for every step, wanted or not (see `filters`)."""
    left, found = ordered(logits), []  # no number's key is 0: not that of -inf either, so none is taken twice
    for _ in range(min(MAX_LOGPROBS, logits.shape[-1])):
        one, left = _without_best(left)
        found.append(one)
    top_ids = jnp.concatenate(found, axis=1)
    return jnp.take_along_axis(logits, top_ids, axis=1), top_ids


@jax.jit
def _without_best(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id i32[R, 1] of the largest of keys u32[R, V], and the keys with 0 in its place."""
    best = jnp.argmax(keys, axis=-1, keepdims=True).astype(jnp.int32)
    return best, jnp.where(lax.broadcasted_iota(jnp.int32, keys.shape, 1) == best, jnp.uint32(0), keys)


def score_if(wanted: jax.Array, logits: jax.Array, chosen: jax.Array) -> Logprobs:
    """`score`, or zeros when `wanted` bool[] is false."""
    return lax.cond(wanted, lambda: score(logits, chosen), lambda: no_logprobs(*logits.shape))


def no_logprobs(num_rows: int, vocab_size: int) -> Logprobs:
    """Zeros in the shape of `score`."""
    width = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        chosen=jnp.zeros(num_rows, jnp.float32),
        top_ids=jnp.zeros((num_rows, width), jnp.int32),
        top=jnp.zeros((num_rows, width), jnp.float32),
    )


def _most_likely(scores: jax.Array) -> jax.Array:
    """The first id i32[R] of the highest of scores f32[R, V], and some id where one is NaN. XLA:CPU's own argmax looks at one
    number after the other: 9.3 ms for 16 x 128k, and 50 with the noise that is fused into it; this takes 2.3 and 19."""
    ids, num = lax.broadcasted_iota(jnp.int32, scores.shape, 1), scores.shape[-1]
    first = jnp.where(scores == scores.max(axis=-1, keepdims=True), ids, num).min(axis=-1)
    return jnp.minimum(first, num - 1)


def _change(logits: jax.Array, state: DecodeState, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Everything that comes before temperature."""
    shaped = lax.cond(jnp.any(rows.shaped), lambda: _shape(logits, state, rows), lambda: logits)
    early = positions < rows.min_length
    shaped = lax.cond(jnp.any(early), lambda: _mask_stops(shaped, rows.stop_ids, early), lambda: shaped)
    return lax.cond(jnp.any(rows.constrained), lambda: _keep_to_grammar(shaped, state, rows), lambda: shaped)


def _shape(logits: jax.Array, state: DecodeState, rows: SamplingRows) -> jax.Array:
    """Bias and penalties. Repetition counts prompt and output, the other two the output alone."""
    history, logits = state.history[rows.slots], logits + state.bias[rows.slots]
    repetition = jnp.where(history > 0, rows.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    counts = history & (PROMPT_BIT - 1)
    logits = logits - counts.astype(jnp.float32) * rows.frequency_penalty[:, None]
    return logits - (counts > 0).astype(jnp.float32) * rows.presence_penalty[:, None]


def _mask_stops(logits: jax.Array, stop_ids: jax.Array, early: jax.Array) -> jax.Array:
    columns = jnp.where(early[:, None], stop_ids, logits.shape[-1])  # out of range: dropped
    return logits.at[jnp.arange(logits.shape[0])[:, None], columns].set(-jnp.inf, mode="drop")


def _keep_to_grammar(logits: jax.Array, state: DecodeState, rows: SamplingRows) -> jax.Array:
    words = state.allowed[rows.slots]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[-1]] > 0
    return jnp.where(allowed | ~rows.constrained[:, None], logits, -jnp.inf)


def _draw(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Gumbel-max: the argmax of scores plus Gumbel noise is a draw from their softmax."""
    temperature = jnp.where(rows.temperature > 0.0, jnp.maximum(rows.temperature, _LEAST_TEMPERATURE), 1.0)
    scores = logits / temperature[:, None]
    filtered = (rows.top_k < logits.shape[-1]) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    keep = lax.cond(
        jnp.any(filtered),
        lambda: keep_mask(scores, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p),
        lambda: jnp.ones(scores.shape, bool),
    )
    noisy = scores + gumbel(rows.seed, rows.choice, positions, logits.shape[-1])
    return _most_likely(jnp.where(keep, noisy, -jnp.inf))
