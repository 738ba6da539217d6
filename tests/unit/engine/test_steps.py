"""What a step hands to its model: rows that a kernel can serve, whatever their neighbours in the dispatch still want."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.engine.batches import ExactBatch
from jdisagg.engine.model import DecoderModel
from jdisagg.engine.state import DecodeState, new_state
from jdisagg.engine.steps import StepFunctions
from jdisagg.models.batch import TokenBatch
from jdisagg.models.sharding import make_mesh
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
        decodes, none = slots < 3, jnp.full(4, -1, jnp.int32)
        batch = ExactBatch(
            token_ids=jnp.zeros(4, jnp.int32), positions=none, slots=slots, decodes=decodes, samples=decodes, targets=none
        )
        functions.exact(cast(Any, None), cast(Any, None), state, batch)
    (batch_seen,) = model.batches
    assert np.asarray(batch_seen.rows.counts).tolist() == [1, 0, 1, 0]
    assert np.asarray(batch_seen.write_pages).tolist() == [3, 0, 8, 0], "its KV goes to the null page"
    assert np.asarray(batch_seen.positions).tolist() == [11, 0, 4, 0]
