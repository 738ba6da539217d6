"""The engine's own steps on a model in memory, compiled ahead of time so that several may compile at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_kit.roofline import seconds_each
from jax.sharding import NamedSharding, PartitionSpec

from gpu_kit.setting import Setting
from gpu_kit.shapes import TOPOLOGIES, whole_shape
from jdisagg.aot.abstract import ModelForm
from jdisagg.aot.accelerators import parse_topology
from jdisagg.aot.roofline import Roofline, Workload
from jdisagg.core.config import LayerLoop, ModelConfig
from jdisagg.engine import state as slots
from jdisagg.engine.batches import PrefillBatch
from jdisagg.engine.buckets import PrefillBucket
from jdisagg.engine.functions import jit_functions
from jdisagg.engine.ops import choose_ops
from jdisagg.engine.packing import pack_prefill
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.pool import KVPool
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.load import LoadedModel, load_model
from jdisagg.models.sharding import make_mesh
from jdisagg.sched.plan import PrefillChunk

PAGE_SIZE = 16
COMPILE_THREADS = 4
RESERVE_BYTES = 6 * 2**30  # for what steps need beside weights and cache


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Bytes and products of one model, by which a step is judged."""

    read_bytes: int  # weights a step reads: all but the embedding, of which it looks rows up
    kv_bytes: int  # of one token
    matmul_weights: int  # parameters that every token meets
    head_weights: int  # parameters that only sampled rows meet
    attention_flop: int  # of one query and one key

    @classmethod
    def of(cls, loaded: LoadedModel) -> Costs:
        """From shapes."""
        spec = loaded.spec
        sizes = jax.tree.map(lambda x: x.size * x.dtype.itemsize, dict(loaded.params))
        embedding = 0 if spec.tied else spec.vocab_size * spec.embed * jnp.dtype(loaded.dtype).itemsize
        read = sum(jax.tree.leaves(sizes)) - embedding
        head = spec.vocab_size * spec.embed
        return cls(
            read_bytes=read,
            kv_bytes=spec.kv_spec(loaded.kv_dtype).bytes_per_token,
            matmul_weights=read // jnp.dtype(loaded.dtype).itemsize - head,
            head_weights=head,
            attention_flop=4 * spec.num_layers * spec.attention.num_heads * spec.attention.head_dim,
        )

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read and written by one decode step: every weight once, every cached token once, one new token a row."""
        return self.read_bytes + batch * (context + 1) * self.kv_bytes

    def prefill_flop(self, num_tokens: int) -> int:
        """Of one prompt in one step, attention over earlier tokens included."""
        attention = self.attention_flop * num_tokens * (num_tokens + 1) // 2
        return 2 * self.matmul_weights * num_tokens + 2 * self.head_weights + attention


class StepBench:
    """Model, cache and state on the first device. Not for two threads, but for compiling."""

    def __init__(self, setting: Setting, *, num_slots: int, max_model_len: int) -> None:
        self._mesh = make_mesh(jax.devices()[:1], 1)
        self._whole = NamedSharding(self._mesh, PartitionSpec())
        directory = whole_shape(small=setting.small).write(setting.scratch / "whole", max_model_len)
        dtype = "float32" if setting.small else "bfloat16"
        config = ModelConfig(model=str(directory), load_format="dummy", dtype=dtype, layer_loop=LayerLoop.AUTO)
        self.loaded = load_model(config, self._mesh, seed=0)
        jax.block_until_ready(self.loaded.params)
        self.costs = Costs.of(self.loaded)
        self.layout: KVLayout = choose_layout(self.loaded.spec.kv_spec(self.loaded.kv_dtype), self._mesh, PAGE_SIZE)
        self.num_pages = self._pages(num_slots * -(-max_model_len // PAGE_SIZE) + 1)
        self._pool = KVPool((self.layout,), self._mesh, self.num_pages)
        self._width = -(-max_model_len // PAGE_SIZE)
        new_state = partial(slots.new_state, num_slots, self._width, self.loaded.spec.vocab_size)
        self._state: Any = jax.jit(new_state, out_shardings=self._whole)()
        model = DecoderModel(self.loaded.spec, choose_ops(self.layout, self._mesh), self.loaded.layer_loop)
        self._functions = jit_functions(model, self.layout, self._mesh, hidden_rows=0)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS)

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_pages - 1) * PAGE_SIZE

    def compiled(self, name: str, batches: Mapping[int, Any], timeout_s: float) -> dict[int, Any]:
        """Executables of one step by size, compiled beside each other in the order given: those that are done in time.

        Nothing is measured meanwhile: compilers try out kernels on the device. Raises what a compilation raised.
        """
        kv = self._pool.take()
        self._pool.put(kv)
        arrays = (self.loaded.params, kv, self._state)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
        futures = {
            size: self._threads.submit(lambda batch=batch: self._functions[name].lower(*arguments, batch).compile())
            for size, batch in batches.items()
        }
        done, _ = wait(futures.values(), timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
        return {size: future.result() for size, future in futures.items() if future in done}

    def foretold_s(self, batch: int, context: int) -> float | None:
        """Of a decode step, by `jdisagg.aot`; None on devices that were never measured."""
        topology = TOPOLOGIES.get(jax.devices()[0].device_kind)
        loaded = self.loaded
        if topology is None:
            return None
        form = ModelForm(spec=loaded.spec, dtype=loaded.dtype, kv_dtype=loaded.kv_dtype, layer_loop=loaded.layer_loop)
        roofline = Roofline(form, self._mesh, self.layout, parse_topology(topology).accelerator)
        found = roofline.time(Workload(phase="decode", rows=batch, tokens=batch, context=context))
        return None if found is None else found.expected_s

    def decode_rows(self, batch: int) -> np.ndarray:
        """Slots that advance."""
        return np.arange(batch, dtype=np.int32)

    def prompt(self, num_tokens: int) -> PrefillBatch:
        """One prompt from its first token, in slot 0, sampled at its end."""
        token_ids = tuple(np.random.default_rng(3).integers(0, self.loaded.spec.vocab_size, num_tokens).tolist())
        chunk = PrefillChunk(slot=0, request_id="prompt", start=0, token_ids=token_ids, samples=True)
        (packed,) = pack_prefill([chunk], (PrefillBucket(num_tokens, 1),), self._state.cursor.shape[1] - 1)
        return packed.batch

    def set_lengths(self, batch: int, context: int, *, room: int = 0) -> None:
        """The first `batch` slots have `context` tokens, and `room` for more, on pages of their own in shuffled order."""
        needed = -(-(context + room) // PAGE_SIZE)
        pages = 1 + np.random.default_rng(4).permutation(self.num_pages - 1)[: batch * needed].reshape(batch, needed)
        table = np.zeros(self._state.page_table.shape, np.int32)
        table[:batch, :needed] = pages
        cursor = np.ones(self._state.cursor.shape, np.int32)
        cursor[1, :batch] = context
        placed = jax.device_put({"page_table": table, "cursor": cursor}, self._whole)
        self._state = replace(self._state, **placed)

    def seconds(self, executable: Any, batch: Any, *, repeats: int, steps: int) -> list[float]:
        """Of one step; the lengths grow with every decode step, so leave room for them."""
        placed = jax.device_put(batch, self._whole)

        def once() -> Any:
            kv, self._state, out = executable(self.loaded.params, self._pool.take(), self._state, placed)
            self._pool.put(kv)
            return out.sampling.tokens

        return seconds_each(once, repeats=repeats, at_once=steps)

    def _pages(self, wanted: int) -> int:
        """All that is wanted, or what the device has room for."""
        stats = jax.devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return wanted
        free = int(stats["bytes_limit"]) - int(stats["bytes_in_use"]) - RESERVE_BYTES
        return max(2, min(wanted, free // self.layout.bytes_per_page))
