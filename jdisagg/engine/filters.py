"""Top-k, top-p and min-p without sorting the vocabulary (a sort takes 105 ms at 16 x 32k on two cores, this 6).

Floats are mapped to integers of the same order, and the threshold is found bit by bit: 32 passes, exact. Of tokens that tie
at the threshold those with the lowest ids stay, so exactly k tokens survive top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def keep_mask(scores: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """bool[R, V]: tokens that may be drawn from softmax(scores f32[R, V]).

    min-p first (against the most likely token), then top-k, then top-p of what top-k left, renormalised. A row with all
    filters off (top_k i32[R] = V, top_p f32[R] = 1, min_p f32[R] = 0) keeps every token.
    """
    vocab_size = scores.shape[-1]
    floor = scores.max(axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
    keep = scores >= floor
    keep = lax.cond(jnp.any(top_k < vocab_size), lambda: keep & _top_k(scores, top_k), lambda: keep)
    return lax.cond(jnp.any(top_p < 1.0), lambda: keep & _top_p(jnp.where(keep, scores, -jnp.inf), top_p), lambda: keep)


def _top_k(scores: jax.Array, k: jax.Array) -> jax.Array:
    keys = ordered(scores)
    threshold = _largest(lambda t: (keys >= t[:, None]).sum(axis=-1) >= k, k.shape)[:, None]
    above = keys > threshold
    return above | _first(keys == threshold, k - above.sum(axis=-1))


def _top_p(scores: jax.Array, p: jax.Array) -> jax.Array:
    """The smallest set of most likely tokens whose probability reaches p."""
    keys = ordered(scores)
    mass = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = jnp.maximum(p, jnp.finfo(jnp.float32).tiny) * mass.sum(axis=-1)  # of 0, which a tiny p is, no token is enough
    threshold = _largest(lambda t: jnp.where(keys >= t[:, None], mass, 0.0).sum(axis=-1) >= wanted, p.shape)[:, None]
    above, equal = keys > threshold, keys == threshold
    each = jnp.where(equal, mass, 0.0).max(axis=-1)
    missing = wanted - jnp.where(above, mass, 0.0).sum(axis=-1)
    num_equal = jnp.maximum(1.0, jnp.ceil(missing / jnp.maximum(each, jnp.finfo(jnp.float32).tiny)))
    num_equal = jnp.minimum(num_equal, scores.shape[-1]).astype(jnp.int32)
    return jnp.where(p[:, None] < 1.0, above | _first(equal, num_equal), True)


def ordered(x: jax.Array) -> jax.Array:
    """u32 keys in the order of the floats; -0.0 counts as 0.0 (adding 0.0 would do so too, but XLA drops that)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest u32 per row for which `holds`, which is true at 0 and monotone; bit by bit, or on a GPU by two.

    A GPU is better off without the loop: XLA leads one, and conditions around it, from the host, which then waits for the
    step; conditions alone become part of a CUDA graph. That costs the host time for each of its kernels, run or not: hence two.
    """

    def step(index: jax.Array, best: jax.Array) -> jax.Array:
        candidate = best | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, best)

    def looped(start: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 32, step, start)

    def unrolled(best: jax.Array) -> jax.Array:
        for shift in range(30, -1, -2):
            best = two_bits(best, jnp.uint32(shift))
        return best

    @jax.jit  # traced once, wherever it is called; XLA inlines it
    def two_bits(best: jax.Array, shift: jax.Array) -> jax.Array:
        candidates = best[:, None] | (jnp.arange(1, 4, dtype=jnp.uint32) << shift)[None, :]
        return best | jax.vmap(holds, 1, 1)(candidates).sum(axis=1, dtype=jnp.uint32) << shift

    return lax.platform_dependent(jnp.zeros(shape, jnp.uint32), cuda=unrolled, default=looped)


def _first(ties: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` i32[R] true entries of `ties` bool[R, V]; the scan over V runs only where ties have to be cut."""

    def cut() -> jax.Array:
        return ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= count[:, None])

    return lax.cond(jnp.any(ties.sum(axis=-1) > count), cut, lambda: ties)
