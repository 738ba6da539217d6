"""What a training run remembers, how a step changes it, and its checkpoint on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from demo_model.net import Params, Shape, token_nats

WARMUP_STEPS = 40
DECAY_FRACTION = 0.6  # of the run, spent in linear decay to zero
MUON_LR, ADAM_LR = 0.02, 3e-3


@dataclass(frozen=True)
class TrainState:
    """Weights and optimiser on the device, position of the run on the host."""

    params: Params  # float32
    optimizer: Any
    step: int = 0
    tokens: int = 0  # consumed so far: the position in the data
    elapsed_s: float = 0.0


def make_optimizer() -> optax.GradientTransformation:
    """Muon (orthogonalised momentum) for the layers' matrices, Adam for embedding and norms; clipped by global norm."""

    def matrices(params: Any) -> Any:
        def numbers(path: tuple[Any, ...], leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
            in_layer = isinstance(path[0], jax.tree_util.DictKey) and path[0].key == "layers"
            return contrib.MuonDimensionNumbers() if in_layer and leaf.ndim == 2 else None

        return jax.tree_util.tree_map_with_path(numbers, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        contrib.muon(
            MUON_LR,
            weight_decay=0.05,
            adam_learning_rate=ADAM_LR,
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def lr_factor(step: int, progress: float) -> float:
    """Share of the peak learning rate: warm-up by steps, constant, then linear to zero over the end of the run.

    `progress` in [0, 1] is the larger of the spent shares of steps and of time, so a slow machine still ends annealed.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / DECAY_FRACTION)


StepFn = Callable[[Params, Any, jax.Array, jax.Array, jax.Array], tuple[Params, Any, jax.Array]]


def make_step(shape: Shape, dtype: jnp.dtype) -> StepFn:
    """(params, optimizer, tokens, segments, lr factor) -> (params, optimizer, mean loss in nats); donates the first two."""
    optimizer = make_optimizer()

    def mean_nats(params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        nats, counted = token_nats(params, tokens, segments, shape=shape, dtype=dtype)
        return jnp.sum(nats, where=counted) / jnp.sum(counted, dtype=nats.dtype)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: Any, tokens: jax.Array, segments: jax.Array, factor: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_nats)(params, tokens, segments)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + factor * u, params, updates)
        return params, state, loss

    return step


def save_state(path: Path, state: TrainState) -> None:
    """Write the whole state to `path`, atomically."""
    leaves = jax.device_get(jax.tree.leaves((state.params, state.optimizer)))
    arrays = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    position = np.array([state.step, state.tokens, state.elapsed_s], np.float64)
    temporary = path.with_suffix(".tmp.npz")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, position=position, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_state(path: Path, like: TrainState) -> TrainState:
    """The state in `path`, in the tree form of `like`; raises ValueError when it belongs to another network."""
    treedef = jax.tree.structure((like.params, like.optimizer))
    with np.load(path) as saved:
        if len(saved.files) != treedef.num_leaves + 1:
            raise ValueError(f"{path} holds {len(saved.files) - 1} arrays, this network has {treedef.num_leaves}")
        leaves = [jnp.asarray(saved[f"leaf_{i}"]) for i in range(treedef.num_leaves)]
        step, tokens, elapsed_s = saved["position"].tolist()
    params, optimizer = jax.tree.unflatten(treedef, leaves)
    return replace(like, params=params, optimizer=optimizer, step=int(step), tokens=int(tokens), elapsed_s=elapsed_s)
