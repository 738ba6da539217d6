"""The jitted functions of one mesh and all that lives on it: parameters, KV pool, decode state.

Every call is one dispatch, which takes its host arrays along; nothing here waits but `wait_for_pages`. They go to every device
of the mesh, and the runtime may alias them: they are never written again. KV and state are donated, and the pool and this
object hold the only references. Arguments have explicit shardings, so a warmed function never compiles again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.engine import state as slots
from jdisagg.engine.batches import ExactBatch, PrefillBatch
from jdisagg.engine.functions import jit_functions
from jdisagg.engine.sampler import Logprobs
from jdisagg.engine.signatures import SIGNATURES, Operand
from jdisagg.engine.steps import PrefillOut, StepOut
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout
from jdisagg.kv.memory import wants_memory
from jdisagg.kv.pool import KVPool
from jdisagg.models.decoder import DecoderModel, Params


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShape:
    """Sizes that are compiled in."""

    max_num_seqs: int  # slots
    pages_per_seq: int  # M
    vocab_size: int
    chunk_tokens: int  # tokens of an exported or imported piece
    prefill_tokens: int  # T of the largest prefill bucket; 0 = there is none


class Device:
    """Runs steps and state updates in the order they are called."""

    def __init__(
        self, model: DecoderModel, params: Params, layout: KVLayout, mesh: Mesh, shape: DeviceShape, *, num_pages: int
    ) -> None:
        """Allocate pool and state on `mesh`; functions compile when first called."""
        self.shape = shape
        self.layout = layout
        self.pool = KVPool((layout,), mesh, num_pages)
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.piece_sharding = layout.piece_sharding(mesh)
        self._model = model
        self._params = params
        new_state = partial(slots.new_state, shape.max_num_seqs, shape.pages_per_seq, shape.vocab_size)
        with wants_memory(
            f"--max-num-seqs: no memory is left for what is kept of {shape.max_num_seqs} requests beside weights and KV; lower "
            "it, or what KV gets (--kv-cache-bytes, --num-pages, --device-memory-utilization)"
        ):
            self._state = jax.block_until_ready(jax.jit(new_state, out_shardings=self.whole)())
        self._functions = jit_functions(model, layout, mesh, hidden_rows=shape.prefill_tokens)

    def lower(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """A `jax.stages.Lowered` of a function, whose call with the same host arguments runs what that compiles to."""
        return self._functions[name].lower(*map(self._operand, SIGNATURES[name].takes), *arguments)

    def prefill(self, batch: PrefillBatch) -> PrefillOut:
        """Run one prefill bucket."""
        return self._step("prefill", batch)

    def score(self, hidden: jax.Array, wanted: np.ndarray) -> Logprobs:
        """Log-probabilities of `wanted` i32[2, S] (row, token that follows) in `hidden` [H, E] of a prefill bucket."""
        return self._functions["score"](self._params, hidden, wanted)

    def decode(self, rows: np.ndarray) -> StepOut:
        """Advance the slots i32[R]; R is a bucket, padding is the dummy slot."""
        return self._step("decode", rows)

    def exact(self, batch: ExactBatch) -> StepOut:
        """Run one tile of the exact step."""
        return self._step("exact", batch)

    def update(self, name: str, *rows: slots.Admissions | np.ndarray) -> None:
        """Change the decode state by rows of `updates`: "admit" fills slots, "append" extends page tables, "history" adds token
        counts and logit bias, "allow" sets what grammars allow next."""
        self._state = self._functions[name](self._state, *rows)

    def export(self, where: np.ndarray) -> KVGroup:
        """KV [L, T, K, F] of the tokens at `where` i32[2, T] (page, offset), in fresh arrays."""
        kv = self.pool.take()
        try:
            return self._functions["export"](kv[0], where)
        finally:
            self.pool.put(kv)

    def import_piece(self, piece: KVGroup, where: np.ndarray) -> None:
        """Store a piece with `piece_sharding` at `where` i32[2, T]."""
        kv = self.pool.take()
        self.pool.put((self._functions["import"](kv[0], piece, where),))

    def wait_for_pages(self) -> None:
        """Return when the cache holds all that was dispatched to it, and the pieces which that came from are free."""
        kv = self.pool.take()
        try:
            jax.block_until_ready(kv)
        finally:
            self.pool.put(kv)

    def empty_piece(self) -> KVGroup:
        """Zeros in the shape and sharding of a piece."""
        rows = self.layout.abstract_rows(self.shape.chunk_tokens)
        return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), rows), self.piece_sharding)

    def empty_hidden(self) -> jax.Array:
        """Zeros in the shape and sharding of what a prefill bucket leaves."""
        hidden = self._model.abstract_hidden(self._params, self.shape.prefill_tokens)
        return jax.device_put(np.zeros(hidden.shape, hidden.dtype), self.whole)

    def _operand(self, operand: Operand) -> Any:
        """To be looked at, not kept: what is donated does not outlive the next call."""
        match operand:
            case Operand.PARAMS:
                return self._params
            case Operand.STATE:
                return self._state
            case Operand.POOL | Operand.GROUP:
                kv = self.pool.take()
                self.pool.put(kv)
                return kv if operand is Operand.POOL else kv[0]
            case Operand.HIDDEN:
                return self.empty_hidden()
            case Operand.PIECE:
                return self.empty_piece()

    def _step(self, name: str, batch: Any) -> Any:
        kv, self._state, out = self._functions[name](self._params, self.pool.take(), self._state, batch)
        self.pool.put(kv)
        return out
