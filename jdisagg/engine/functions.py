"""The jitted functions of one mesh, with their donations and output shardings; nothing is allocated or compiled here.

prefill decode exact    (params, kv, state, batch) -> (kv, state, ...Out)      kv and state are donated
score                   (params, hidden, wanted) -> Logprobs
admit append history allow
                        (state, ...) -> state                                  state is donated
export                  (kv of a group, where) -> piece
import                  (kv of a group, piece, where) -> kv of the group       kv is donated
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.engine import state as slots
from jdisagg.engine.compile_options import step_options
from jdisagg.engine.moves import scatter_tokens
from jdisagg.engine.steps import StepFunctions
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout
from jdisagg.models.decoder import DecoderModel


def jit_functions(model: DecoderModel, layout: KVLayout, mesh: Mesh, *, hidden_rows: int) -> dict[str, Any]:
    """Every function by name. `hidden_rows`: as in `StepFunctions`. `mesh` may be one of abstract devices: then they can be
    lowered and compiled, not called."""
    whole, kv, pieces = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, layout.partition), layout.piece_sharding(mesh)
    steps = StepFunctions(model, layout.page_size, hidden_rows, whole)
    # Where they are said to lie, host arrays go along with the call: a device_put before it costs four times as much.
    placed: dict[str, Any] = {"in_shardings": (None, None, None, whole), "out_shardings": ((kv,), whole, whole)}
    platform = mesh.devices.flat[0].platform
    update = partial(jax.jit, donate_argnums=0, in_shardings=(None, whole), out_shardings=whole)

    def step(name: str, function: Callable[..., Any]) -> Any:
        return jax.jit(function, donate_argnums=(1, 2), compiler_options=step_options(name, platform), **placed)

    def gather(cache: KVGroup, where: jax.Array) -> KVGroup:
        return layout.gather_tokens(mesh, cache, where[0], where[1])

    def scatter(cache: KVGroup, piece: KVGroup, where: jax.Array) -> KVGroup:
        return scatter_tokens(layout, mesh, cache, piece, where)

    return {
        "prefill": step("prefill", steps.prefill),
        "decode": step("decode", steps.decode),
        "exact": step("exact", steps.exact),
        "score": jax.jit(steps.score, in_shardings=(None, whole, whole), out_shardings=whole),
        "admit": update(slots.admit),
        "append": update(slots.append_pages),
        "history": update(slots.add_history, in_shardings=(None, whole, whole)),
        "allow": update(slots.allow, in_shardings=(None, whole, whole)),
        "export": jax.jit(gather, in_shardings=(None, whole), out_shardings=pieces),
        "import": jax.jit(scatter, donate_argnums=0, in_shardings=(None, None, whole), out_shardings=kv),
    }
