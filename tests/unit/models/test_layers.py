from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.models.layers import angles, linear, rms_norm, rotate
from jdisagg.models.rope import RopeSpec


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_linear_is_x_times_kernel_plus_bias(dtype: str, tolerance: float) -> None:
    x, kernel, bias = (
        jnp.asarray(normal(0, 5, 64), dtype),
        jnp.asarray(normal(1, 64, 8), dtype),
        jnp.asarray(normal(2, 8), dtype),
    )
    got = linear({"kernel": kernel, "bias": bias}, x)
    wanted = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64) + np.asarray(bias, np.float64)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance * 8)


def test_bfloat16_products_are_summed_in_float32() -> None:
    # 4096 ones after one 4096: in bfloat16 4096 + 1 is 4096 and the ones would be lost one by one.
    x = jnp.asarray(np.concatenate([[4096.0], np.ones(4096)])[None, :], jnp.bfloat16)
    got = linear({"kernel": jnp.ones((4097, 1), jnp.bfloat16)}, x)
    assert float(got[0, 0]) == 8192.0


def test_rms_norm_is_computed_in_float32() -> None:
    x = jnp.asarray(normal(0, 4, 2, 32) * 100, jnp.bfloat16)
    scale = jnp.asarray(normal(1, 32), jnp.bfloat16)
    x64 = np.asarray(x, np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
    np.testing.assert_allclose(np.asarray(rms_norm({"scale": scale}, x, 1e-6), np.float64), wanted, rtol=2**-8)


def test_rotation_depends_on_the_distance_only() -> None:
    rope = RopeSpec(head_dim=8, theta=100.0)
    q, k = jnp.asarray(normal(0, 1, 1, 8)), jnp.asarray(normal(1, 1, 1, 8))

    def score(i: int, j: int) -> float:
        turned = [rotate(x, *angles(rope, jnp.asarray([at], jnp.int32))) for x, at in ((q, i), (k, j))]
        return float(jnp.vdot(*turned))

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_rotation_at_position_zero_changes_nothing() -> None:
    x = jnp.asarray(normal(0, 2, 3, 8))
    turned = rotate(x, *angles(RopeSpec(head_dim=8, theta=1e4), jnp.zeros(2, jnp.int32)))
    np.testing.assert_array_equal(turned, x)


def test_rotation_can_be_traced_under_a_transfer_guard(no_implicit_transfers: None) -> None:
    rope = RopeSpec(head_dim=8, theta=1e4)
    positions = jax.device_put(np.arange(3, dtype=np.int32))
    cos, _ = jax.jit(lambda p: angles(rope, p))(positions)
    assert cos.shape == (3, 1, 4)
