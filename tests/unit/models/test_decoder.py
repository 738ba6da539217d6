"""The forward pass as it is traced: what a start costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.config import LayerLoop
from jdisagg.kv.group import KVGroup
from jdisagg.models.batch import TokenBatch
from jdisagg.models.decoder import DecoderModel
from jdisagg.models.init import random_params
from jdisagg.models.sharding import make_mesh
from jdisagg.models.spec import ModelSpec
from pallas_kernels.rows import rows_of_tokens
from tests.unit.engine.support import CONFIG

NUM_LAYERS = 6


@dataclass(eq=False)
class Counted:
    """Ops that count how often a layer is traced, and let every layer leave its number in the cache."""

    windows: list[int | None]

    def write(self, kv: KVGroup, layer: Any, k: jax.Array, v: jax.Array, batch: TokenBatch) -> KVGroup:
        return replace(kv, data=kv.data.at[layer].set(layer))

    def attend(
        self, q: jax.Array, kv: KVGroup, layer: Any, batch: TokenBatch, *, scale: float, window: int | None
    ) -> jax.Array:
        self.windows.append(window)
        return q


@pytest.mark.parametrize("windows", [(None,) * NUM_LAYERS, (None, 4, None, 8, 4, None)])
def test_layers_that_are_alike_are_traced_once_and_each_has_its_own_place_in_the_cache(windows: tuple[int | None, ...]) -> None:
    spec = ModelSpec.from_config(CONFIG | {"num_hidden_layers": NUM_LAYERS})
    spec = replace(spec, attention=replace(spec.attention, windows=windows))
    params = random_params(spec, make_mesh(jax.devices("cpu"), 1), "float32", seed=1)
    ops, zeros = Counted([]), jnp.zeros(3, jnp.int32)
    batch = TokenBatch(
        token_ids=zeros,
        positions=zeros,
        write_pages=zeros,
        write_offsets=zeros,
        page_tables=zeros[:, None],
        rows=rows_of_tokens(zeros, zeros == 0),
    )
    kv, _ = jax.jit(DecoderModel(spec, ops, LayerLoop.UNROLLED).forward)(
        params, (KVGroup(jnp.zeros(NUM_LAYERS, jnp.int32)),), batch
    )
    assert kv[0].data.tolist() == list(range(NUM_LAYERS))
    assert len(ops.windows) == len(set(windows))
    assert set(ops.windows) == set(windows)
