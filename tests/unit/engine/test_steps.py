"""What a step hands to its model: rows that a kernel can serve, whatever their neighbours in the dispatch still want."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.engine.batches import ExactBatch
from jdisagg.engine.buckets import EXACT_ROWS
from jdisagg.engine.state import DecodeState, new_state
from jdisagg.engine.steps import StepFunctions
from jdisagg.models.batch import TokenBatch
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.sharding import make_mesh
from pallas_kernels.blocks import blocks_by_rule
from pallas_kernels.gpu_blocks import gpu_blocks_by_rule
from tests.unit.engine.support import VOCAB

PAGE_SIZE = 4
NUM_PAGES = 3  # of a page table: 12 tokens


@dataclass
class Recorder:
    """A model that only looks at what it gets."""

    batches: list[TokenBatch] = field(default_factory=list)

    def forward(self, params: Any, kv: Any, batch: TokenBatch) -> tuple[Any, jax.Array]:
        self.batches.append(batch)
        return kv, jnp.zeros((batch.token_ids.shape[0], 1))

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        return jnp.zeros((hidden.shape[0], VOCAB))


def with_lengths(lengths: list[int]) -> DecodeState:
    """Slots with so many known tokens, and page tables that are full."""
    state = new_state(len(lengths), NUM_PAGES, VOCAB)
    tables = 1 + jnp.arange(len(lengths) * NUM_PAGES, dtype=jnp.int32).reshape(len(lengths), NUM_PAGES)
    return replace(
        state, cursor=state.cursor.at[1, :-1].set(jnp.asarray(lengths)), page_table=state.page_table.at[:-1].set(tables)
    )


def run_exact(functions: StepFunctions, state: DecodeState) -> None:
    """All slots decode; the last is the dummy."""
    slots = jnp.arange(len(state.history), dtype=jnp.int32)
    decodes, none = slots < slots[-1], jnp.full(len(slots), -1, jnp.int32)
    tokens = jnp.zeros(len(slots), jnp.int32)
    batch = ExactBatch(token_ids=tokens, positions=none, slots=slots, decodes=decodes, samples=decodes, targets=none)
    functions.exact(cast(Any, None), cast(Any, None), state, batch)


@pytest.mark.parametrize("step", ["decode", "exact"])
def test_a_row_whose_page_table_is_full_has_no_query(step: str) -> None:
    """Of several steps in one dispatch it needs fewer than its neighbours, and the context ends here: a kernel would look for
    its page behind the page table, where another array may lie."""
    model, mesh = Recorder(), make_mesh(jax.devices("cpu"), 1)
    functions = StepFunctions(cast(DecoderModel, model), PAGE_SIZE, 0, NamedSharding(mesh, PartitionSpec()))
    state = with_lengths([PAGE_SIZE * NUM_PAGES, PAGE_SIZE * NUM_PAGES + 1, 5])
    slots = jnp.arange(4, dtype=jnp.int32)  # the last is the dummy
    if step == "decode":
        functions.decode(cast(Any, None), cast(Any, None), state, slots)
    else:
        run_exact(functions, state)
    (batch_seen,) = model.batches
    assert np.asarray(batch_seen.rows.counts).tolist() == [1, 0, 1, 0]
    assert np.asarray(batch_seen.write_pages).tolist() == [3, 0, 8, 0], "its KV goes to the null page"
    assert np.asarray(batch_seen.positions).tolist() == [11, 0, 4, 0]


def tables_of_exact(page_size: int, num_pages: int) -> tuple[int, ...]:
    """Rows and entries of the page tables that a kernel gets, of a worker whose contexts have so many pages."""
    model, mesh = Recorder(), make_mesh(jax.devices("cpu"), 1)
    functions = StepFunctions(cast(DecoderModel, model), page_size, 0, NamedSharding(mesh, PartitionSpec()))
    run_exact(functions, new_state(EXACT_ROWS - 1, num_pages, VOCAB))
    return model.batches[0].page_tables.shape


def test_a_kernel_splits_keys_of_an_exact_step_alike_whatever_the_longest_context() -> None:
    """Sums that are joined in another order have other bits, and P may have another --max-model-len than D."""
    tables = {sizes: tables_of_exact(*sizes) for sizes in ((16, 4), (16, 600), (128, 1), (128, 300))}
    for dtype, num_kv_heads, dim in itertools.product(("float32", "bfloat16", "int8"), (1, 2, 8), (64, 128)):
        q: Any = jax.ShapeDtypeStruct((EXACT_ROWS, 8, dim), jnp.float32 if dtype == "float32" else jnp.bfloat16)
        on_gpu, on_tpu = set(), set()
        for (page_size, _), (num_rows, width) in tables.items():
            of_tokens: Any = jax.ShapeDtypeStruct((1, 9, page_size, num_kv_heads, 2 * dim), jnp.dtype(dtype))
            of_heads: Any = jax.ShapeDtypeStruct((1, 9, num_kv_heads, page_size, 2 * dim), jnp.dtype(dtype))
            on_gpu.add(gpu_blocks_by_rule(kv=of_tokens, q=q, decode=True, num_rows=num_rows, max_keys=width * page_size))
            on_tpu.add(blocks_by_rule(kv=of_heads, q=q, decode=True, max_pages=width).pages * page_size)
        assert (len(on_gpu), len(on_tpu)) == (1, 1)
