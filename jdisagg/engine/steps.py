"""The steps: pure functions of (params, kv, state, batch). kv and state are donated by whoever jits them.

A sampled token is recorded in the state on the device, so the next step may be dispatched before the host has read it.
`exact` is the step of `--numerics exact`: every token, prompt or generated, is one row of one executable of R rows, so its bits
depend on weights and prefix alone. The fast pair makes tiles of prompts and a compact batch of decode rows instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.engine.batches import ExactBatch, PrefillBatch
from jdisagg.engine.buckets import EXACT_KEYS
from jdisagg.engine.sampler import Logprobs, Sampling, sample, score, score_if
from jdisagg.engine.state import DecodeState, record_tokens, take_rows
from jdisagg.models.batch import TokenBatch
from jdisagg.models.decoder import KV, DecoderModel, Params
from pallas_kernels.rows import Rows, rows_of_tiles, rows_of_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillOut:
    """What a prefill step leaves on the device."""

    sampling: Sampling  # per row
    hidden: jax.Array  # [H, E] of all tokens, for `StepFunctions.score`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOut:
    """What the host may read of a step."""

    sampling: Sampling  # per row
    prompt: tuple[Logprobs, ...]  # of what follows in prompts; in one piece per row of an exact step


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """The steps of one model and page size; logits are made whole on every shard before sampling."""

    model: DecoderModel
    page_size: int
    hidden_rows: int  # that a prefill step leaves, at least: one `score` then serves all sizes
    replicated: NamedSharding

    def prefill(self, params: Params, kv: KV, state: DecodeState, batch: PrefillBatch) -> tuple[KV, DecodeState, PrefillOut]:
        """Compute KV of all tokens and sample after R of them."""
        valid = batch.positions >= 0
        tables = state.page_table[batch.tile_slots]
        chunks = rows_of_tiles(batch.positions, valid, batch.tile_slots)
        kv, hidden = self.model.forward(params, kv, self._tokens(batch.token_ids, batch.positions, valid, tables, chunks))
        rows = take_rows(state, batch.sample_slots)
        positions = batch.positions[batch.sample_tokens] + 1
        sampling = sample(self._logits(params, hidden[batch.sample_tokens]), state, rows, positions)
        state = record_tokens(state, batch.sample_slots, sampling.tokens, positions)
        missing = max(0, self.hidden_rows - len(hidden))
        return kv, state, PrefillOut(sampling, jnp.pad(hidden, ((0, missing), (0, 0))))

    def score(self, params: Params, hidden: jax.Array, wanted: jax.Array) -> Logprobs:
        """Log-probabilities of S tokens of a prefill step's prompts: `wanted` i32[2, S] has rows of `hidden` [H, E] and the
        tokens that follow there. [H, V] never exists. In `prefill` it would take a loop, which on a GPU the host leads: it
        would wait for the whole step, wanted or not, and announce KV of its chunk as late."""
        return score(self._logits(params, hidden[wanted[0]]), wanted[1])

    def decode(self, params: Params, kv: KV, state: DecodeState, slots: jax.Array) -> tuple[KV, DecodeState, StepOut]:
        """Advance `slots` i32[R] by one token each; padding is the dummy slot."""
        tokens, lengths = state.cursor[:, slots]
        valid = (slots < state.history.shape[0] - 1) & self._has_entry(state, lengths - 1)
        batch = self._tokens(tokens, lengths - 1, valid, state.page_table[slots], rows_of_tokens(lengths - 1, valid))
        kv, hidden = self.model.forward(params, kv, batch)
        sampling = sample(self._logits(params, hidden), state, take_rows(state, slots), lengths)
        return kv, record_tokens(state, slots, sampling.tokens, lengths), StepOut(sampling, ())

    def exact(self, params: Params, kv: KV, state: DecodeState, batch: ExactBatch) -> tuple[KV, DecodeState, StepOut]:
        """Feed R tokens; KV of all is written before any attends, so rows of one sequence may share the step."""
        known, lengths = state.cursor[:, batch.slots]
        token_ids = jnp.where(batch.decodes, known, batch.token_ids)
        positions = jnp.where(batch.decodes, lengths - 1, batch.positions)
        valid = (positions >= 0) & self._has_entry(state, positions)
        rows = rows_of_tokens(positions, valid)
        tokens = self._tokens(token_ids, positions, valid, self._wide(state.page_table[batch.slots]), rows)
        kv, hidden = self.model.forward(params, kv, tokens)
        logits = self._logits(params, hidden)
        slots = jnp.where(batch.samples, batch.slots, state.history.shape[0] - 1)
        sampling = sample(logits, state, take_rows(state, slots), positions + 1)
        state = record_tokens(state, slots, sampling.tokens, positions + 1)
        prompt = score_if(jnp.any(batch.targets >= 0), logits, jnp.maximum(batch.targets, 0))
        return kv, state, StepOut(sampling, (prompt,))

    def _has_entry(self, state: DecodeState, positions: jax.Array) -> jax.Array:
        """Whether the page table goes as far as `positions`. Of several steps in one dispatch, one that ends with its context
        needs fewer than its neighbours: kernels would read its next page from what lies behind its table."""
        return positions < state.page_table.shape[1] * self.page_size

    def _wide(self, tables: jax.Array) -> jax.Array:
        """By a table's width a kernel chooses into how many parts it splits keys, up to EXACT_KEYS: bits would depend on
        `--max-model-len`, of which a worker may have another."""
        missing = -(-EXACT_KEYS // self.page_size) - tables.shape[1]
        return jnp.pad(tables, ((0, 0), (0, max(0, missing))))

    def _tokens(
        self, token_ids: jax.Array, positions: jax.Array, valid: jax.Array, tables: jax.Array, rows: Rows
    ) -> TokenBatch:
        """Flat tokens [T] in tiles of the sequences with page tables i32[N, M]; padding goes to the null page."""
        positions = jnp.where(valid, positions, 0)
        entries = positions.reshape(tables.shape[0], -1) // self.page_size
        pages = jnp.take_along_axis(tables, entries, axis=1, mode="clip").reshape(-1)
        return TokenBatch(
            token_ids=jnp.where(valid, token_ids, 0),
            positions=positions,
            write_pages=jnp.where(valid, pages, 0),
            write_offsets=jnp.where(valid, positions % self.page_size, 0),
            page_tables=tables,
            rows=rows,
        )

    def _logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Each shard multiplies its own part of the vocabulary, then the results are gathered: constraining the product to be
        whole at once makes XLA gather the weights instead, in every step."""
        mesh, logits = self.replicated.mesh, self.model.logits(params, hidden)
        if logits.shape[-1] % mesh.size == 0:
            logits = lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(None, *mesh.axis_names)))
        return lax.with_sharding_constraint(logits, self.replicated)
