"""What the device knows of every slot, so that a steady decode step uploads nothing but which slots advance.

Slots are rows [0, max_num_seqs); one more row, the dummy, stands for padding: it has length 1, an empty page table, greedy
sampling, and is never written. Few stacked leaves instead of one per field: each donated leaf costs about 3 us per call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.core.requests import MAX_STOP_TOKEN_IDS

PROMPT_BIT = 1 << 30  # in `history`: the token occurs in the prompt
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INT_COLUMNS = ("top_k", "seed", "choice", "min_length", "num_top", "shaped", "constrained")  # then the stop ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Rows of B = max_num_seqs + 1 slots; donated through every step."""

    cursor: jax.Array  # i32[2, B]; last known token, and number of known tokens
    page_table: jax.Array  # i32[B, M]
    floats: jax.Array  # f32[B, len(FLOAT_COLUMNS)]
    ints: jax.Array  # i32[B, len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS]
    history: jax.Array  # i32[B, V]; times generated, plus PROMPT_BIT
    bias: jax.Array  # f32[B, V]; added to the logits
    allowed: jax.Array  # u32[B, ceil(V / 32)]; bit t of a row: its grammar allows token t next; read where `constrained`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of R rows. `top_k` is V when off; `num_top` is -1 when no log-probabilities are wanted."""

    slots: jax.Array  # i32[R]
    temperature: jax.Array  # f32[R]
    top_p: jax.Array  # f32[R]
    min_p: jax.Array  # f32[R]
    repetition_penalty: jax.Array  # f32[R]
    presence_penalty: jax.Array  # f32[R]
    frequency_penalty: jax.Array  # f32[R]
    top_k: jax.Array  # i32[R]
    seed: jax.Array  # u32[R]
    choice: jax.Array  # i32[R]
    min_length: jax.Array  # i32[R]; stop ids are masked while fewer tokens are known
    num_top: jax.Array  # i32[R]
    shaped: jax.Array  # bool[R]; penalties or logit bias are in use
    constrained: jax.Array  # bool[R]; only tokens that the slot's grammar allows
    stop_ids: jax.Array  # i32[R, MAX_STOP_TOKEN_IDS]; padded with V


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admissions:
    """Slots to fill, A at a time; padding rows name slot B, which does not exist."""

    cursor: jax.Array  # i32[3, A]; slot, last token, number of tokens
    page_table: jax.Array  # i32[A, M]
    floats: jax.Array  # f32[A, ...]
    ints: jax.Array  # i32[A, ...]


def new_state(num_slots: int, num_pages_per_slot: int, vocab_size: int) -> DecodeState:
    """All slots empty, the dummy included."""
    rows = num_slots + 1
    ints = jnp.zeros((rows, len(INT_COLUMNS) + MAX_STOP_TOKEN_IDS), jnp.int32)
    ints = ints.at[:, len(INT_COLUMNS) :].set(vocab_size)
    ints = ints.at[:, INT_COLUMNS.index("top_k")].set(vocab_size).at[:, INT_COLUMNS.index("num_top")].set(-1)
    floats = jnp.zeros((rows, len(FLOAT_COLUMNS)), jnp.float32)
    return DecodeState(
        cursor=jnp.stack([jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.int32)]),
        page_table=jnp.zeros((rows, num_pages_per_slot), jnp.int32),
        floats=floats.at[:, FLOAT_COLUMNS.index("top_p")].set(1.0).at[:, FLOAT_COLUMNS.index("repetition_penalty")].set(1.0),
        ints=ints,
        history=jnp.zeros((rows, vocab_size), jnp.int32),
        bias=jnp.zeros((rows, vocab_size), jnp.float32),
        allowed=jnp.zeros((rows, words_of(vocab_size)), jnp.uint32),
    )


def words_of(vocab_size: int) -> int:
    """Words of 32 bits, one bit per token."""
    return -(-vocab_size // 32)


def admit(state: DecodeState, rows: Admissions) -> DecodeState:
    """Fill slots; their history and bias start at zero."""
    slots = rows.cursor[0]
    return DecodeState(
        cursor=state.cursor.at[:, slots].set(rows.cursor[1:], mode="drop"),
        page_table=state.page_table.at[slots].set(rows.page_table, mode="drop"),
        floats=state.floats.at[slots].set(rows.floats, mode="drop"),
        ints=state.ints.at[slots].set(rows.ints, mode="drop"),
        history=state.history.at[slots].set(0, mode="drop"),
        bias=state.bias.at[slots].set(0.0, mode="drop"),
        allowed=state.allowed,
    )


def append_pages(state: DecodeState, appends: jax.Array) -> DecodeState:
    """Set page-table entries: `appends` i32[3, C] is slot, index, page; padding names slot B."""
    return replace(state, page_table=state.page_table.at[appends[0], appends[1]].set(appends[2], mode="drop"))


def add_history(state: DecodeState, entries: jax.Array, bias: jax.Array) -> DecodeState:
    """Add to single (slot, token) cells: `entries` i32[3, C] is slot, token, amount; `bias` f32[C] goes to the same cells."""
    slots, tokens, amount = entries
    history = state.history.at[slots, tokens].add(amount, mode="drop")
    return replace(state, history=history, bias=state.bias.at[slots, tokens].add(bias, mode="drop"))


def allow(state: DecodeState, slots: jax.Array, words: jax.Array) -> DecodeState:
    """Set what the grammars of `slots` i32[C] allow next: `words` u32[C, W]; padding names slot B."""
    return replace(state, allowed=state.allowed.at[slots].set(words, mode="drop"))


def take_rows(state: DecodeState, slots: jax.Array) -> SamplingRows:
    """Sampling parameters of `slots` i32[R]."""
    floats, ints = state.floats[slots], state.ints[slots]
    named = {name: floats[:, column] for column, name in enumerate(FLOAT_COLUMNS)}
    named |= {name: ints[:, column] for column, name in enumerate(INT_COLUMNS)}
    named["seed"] = lax.bitcast_convert_type(named["seed"], jnp.uint32)
    named["shaped"], named["constrained"] = named["shaped"] > 0, named["constrained"] > 0
    return SamplingRows(slots=slots, stop_ids=ints[:, len(INT_COLUMNS) :], **named)


def record_tokens(state: DecodeState, slots: jax.Array, tokens: jax.Array, positions: jax.Array) -> DecodeState:
    """Token `tokens` i32[R] was sampled at index `positions` i32[R] of the sequence in `slots` i32[R]; the dummy stays."""
    num_rows = state.history.shape[0]
    slots = jnp.where(slots == num_rows - 1, num_rows, slots)  # dropped
    cursor = state.cursor.at[:, slots].set(jnp.stack([tokens, positions + 1]), mode="drop")
    return replace(state, cursor=cursor, history=state.history.at[slots, tokens].add(1, mode="drop"))
