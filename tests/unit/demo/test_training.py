"""The training code: attention and its gradient, data order, schedule, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_model.net import Shape, attention, init_params
from demo_model.state import TrainState, load_state, lr_factor, make_optimizer, make_step, save_state
from demo_model.tokens import Stream

TINY = Shape(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8,
)  # fmt: skip


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    seen = jnp.tril(jnp.ones((1, length, length), bool)) & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1), v)


def test_attention_and_its_gradient_equal_the_plain_form() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 4, 150, 8))
    k, v = (jax.random.normal(key, (2, 2, 150, 8)) for key in keys[1:])
    segments = jnp.arange(150)[None, :] // jnp.array([[40], [100]])

    def loss(form: object, arrays: tuple[jax.Array, ...]) -> jax.Array:
        assert callable(form)
        return jnp.sum(jnp.sin(form(*arrays, segments)))

    ours, plain = (jax.value_and_grad(lambda a, f=form: loss(f, a))((q, k, v)) for form in (attention, plain_attention))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_an_epoch_deals_every_window_once_and_a_resumed_run_goes_on_in_it() -> None:
    documents = [np.arange(start, start + 37, dtype=np.int32) for start in range(0, 3700, 37)]
    stream = Stream(documents, seed=3)
    shape = {"rows": 2, "seq_len": 16}
    batches = list(islice(stream.batches(**shape, start_token=0), 200))
    per_epoch = (stream.num_tokens - 17) // 32
    seen = np.concatenate([tokens[:, :-1].ravel() for tokens, _ in batches[:per_epoch]])
    assert len(seen) == len(set(seen.tolist()))
    resumed = next(stream.batches(**shape, start_token=150 * 32))
    np.testing.assert_array_equal(resumed[0], batches[150][0])
    tokens, segments = batches[0]
    np.testing.assert_array_equal(np.diff(segments) != 0, np.diff(tokens // 37) != 0)


def test_learning_rate_ends_at_zero_whether_steps_or_time_run_out() -> None:
    assert lr_factor(0, 0.0) < 0.1
    assert lr_factor(200, 0.3) == 1.0
    assert lr_factor(200, 0.7) == pytest.approx(0.5)
    assert lr_factor(200, 1.0) == 0.0


@pytest.fixture
def lax_promotion() -> Iterator[None]:
    """optax mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("lax_promotion")
def test_training_lowers_the_loss_and_a_checkpoint_brings_all_of_it_back(tmp_path: Path) -> None:
    step = make_step(TINY, jnp.dtype(jnp.float32))
    params = init_params(jax.random.key(0), TINY)
    optimizer = make_optimizer().init(params)
    tokens = jnp.asarray(np.tile(np.arange(17) % 5, (2, 1)), jnp.int32)
    segments = jnp.zeros_like(tokens)
    losses = []
    for _ in range(20):
        params, optimizer, loss = step(params, optimizer, tokens, segments, jnp.float32(0.5))
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
    state = TrainState(params, optimizer, step=20, tokens=640, elapsed_s=1.5)
    save_state(tmp_path / "state.npz", state)
    fresh = init_params(jax.random.key(1), TINY)
    loaded = load_state(tmp_path / "state.npz", TrainState(fresh, make_optimizer().init(fresh)))
    assert (loaded.step, loaded.tokens, loaded.elapsed_s) == (20, 640, 1.5)
    for a, b in zip(jax.tree.leaves((params, optimizer)), jax.tree.leaves((loaded.params, loaded.optimizer)), strict=True):
        np.testing.assert_array_equal(a, b)
