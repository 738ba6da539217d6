"""What steps do otherwise on a GPU, on this machine: equal results, and what XLA is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdisagg.aot.planned import planned_mesh
from jdisagg.core.config import Config, SchedulerConfig
from jdisagg.core.requests import MAX_LOGPROBS, Role
from jdisagg.engine import filters, sampler
from jdisagg.engine.compile_options import step_options
from jdisagg.engine.sizing import runner_shape
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.spec import KVSpec

VOCAB = 300


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced from here on takes the way of a GPU."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))


def scores() -> jax.Array:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((7, VOCAB)).astype(np.float32)
    rows[1] = rows[1].round(1)  # many ties
    rows[2, 7:] = -np.inf  # fewer than are asked for
    rows[3] = 0.25
    rows[6, :290], rows[6, 2:] = -np.inf, np.finfo(np.float32).min  # finite, and hardly more
    return jnp.asarray(rows)


def log_probabilities(x: jax.Array) -> sampler.Logprobs:
    return jax.jit(lambda x: sampler.score(x, jnp.zeros(x.shape[0], jnp.int32)))(x)


def kept(x: jax.Array) -> jax.Array:
    top_k = jnp.asarray([3, 20, 5, 7, VOCAB, 1, 4], jnp.int32)
    top_p = jnp.asarray([0.9, 0.5, 1.0, 0.3, 0.7, 0.1, 0.9], jnp.float32)
    return jax.jit(lambda x: filters.keep_mask(x, top_k=top_k, top_p=top_p, min_p=jnp.zeros(7, jnp.float32)))(x)


def test_the_best_tokens_are_those_of_a_sort(request: pytest.FixtureRequest) -> None:
    wanted = log_probabilities(scores())
    request.getfixturevalue("on_gpu")
    found = log_probabilities(scores())
    assert found.top_ids.shape == (7, MAX_LOGPROBS)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
    np.testing.assert_array_equal(found.top, wanted.top)


def test_filters_keep_the_same_tokens_without_a_loop(request: pytest.FixtureRequest) -> None:
    wanted = kept(scores())
    request.getfixturevalue("on_gpu")
    np.testing.assert_array_equal(kept(scores()), wanted)
    keep = jax.jit(
        lambda x: filters.keep_mask(x, top_k=jnp.full(7, 3, jnp.int32), top_p=jnp.full(7, 0.5), min_p=jnp.zeros(7, jnp.float32))
    )
    assert "while" not in keep.lower(scores()).as_text()


@pytest.mark.parametrize(
    ("platforms", "is_looped"),
    [(("cuda",), False), (("rocm",), True), (("tpu",), True), (("cpu",), True), (("cpu", "cuda"), True)],
)
def test_the_way_of_a_gpu_is_chosen_by_what_a_step_is_lowered_for(platforms: tuple[str, ...], is_looped: bool) -> None:
    """With no stand-in for jax's own choice, and no GPU."""
    texts = [jax.jit(of).trace(scores()).lower(lowering_platforms=platforms).as_text() for of in (kept, log_probabilities)]
    assert ("while" in texts[0], "top_k" in texts[1]) == (is_looped, is_looped)


def test_only_steps_of_a_gpu_are_compiled_otherwise() -> None:
    assert all(step_options(step, platform) is None for step in ("prefill", "decode", "exact") for platform in ("cpu", "tpu"))
    assert step_options("prefill", "gpu") is None
    assert step_options("decode", "gpu") == {"xla_gpu_dot_merger_threshold_mb": 1024}


def test_an_exact_step_is_not_what_was_fastest_when_it_was_compiled() -> None:
    options = step_options("exact", "cuda")
    assert options is not None
    assert options["xla_gpu_autotune_level"] == 0
    assert options["xla_gpu_enable_triton_gemm"] is False


@pytest.mark.parametrize("step", ["decode", "exact"])
def test_xla_knows_the_options(step: str) -> None:
    """One that it does not know would keep a worker on a GPU from starting."""
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=step_options(step, "gpu"))
    assert compiled(1.0) == 2.0


@pytest.mark.parametrize(("platform", "rows"), [("cpu", (1, 4, 16, 64)), ("tpu", (1, 4, 16, 64)), ("gpu", (4, 16, 64))])
def test_a_decode_step_has_rows_enough_for_its_platform(platform: str, rows: tuple[int, ...]) -> None:
    mesh = planned_mesh(platform, 1)
    layout = choose_layout(KVSpec(num_layers=1, num_kv_heads=2, features=128, dtype="float32"), mesh, 16)
    shape = runner_shape(Config(scheduler=SchedulerConfig(max_num_seqs=64)), Role.UNIFIED, 64, layout)
    assert shape.decode == rows
