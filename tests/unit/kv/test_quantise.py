"""int8 KV: the stated error, one answer whatever surrounds a token, and the same one from NumPy and from JAX."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.kv.quantise import dequantise, quantise
from jdisagg.kv.spec import KVSpec


def rows(seed, shape, spread=6):
    """Values over many magnitudes, some exactly zero."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 10.0 ** rng.uniform(-spread, spread, size=(*shape[:-1], 1))
    return (values * (rng.random(shape) > 0.05)).astype(np.float32)


@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 9), heads=st.integers(1, 4), dim=st.sampled_from([1, 2, 8, 33]))
def test_the_error_is_at_most_half_a_scale_which_is_the_largest_value_of_the_half_by_127(seed, tokens, heads, dim):
    x = rows(seed, (tokens, heads, 2 * dim))
    data, scales = quantise(x)
    assert (data.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (tokens, heads, 2))
    for half in range(2):
        part = slice(half * dim, (half + 1) * dim)
        largest = np.abs(x[..., part]).max(axis=-1, keepdims=True)
        error = np.abs(dequantise(data, scales)[..., part].astype(np.float64) - x[..., part])
        # two roundings of a quotient of up to 127, one of the product: 1.5e-5 and 0.8e-5 of a scale
        assert (error <= largest / 254 * (1 + 5e-5) + 2.0**-127).all()
        assert (np.abs(data[..., part]).max(axis=-1) == np.where(largest[..., 0] > 0, 127, 0)).all()


def test_zeros_and_values_near_the_end_of_float32_stay_finite_and_within_the_bound():
    x = np.array([[0.0, 0.0, 3e38, -1e38], [1e-45, -1e-40, 1.2e-38, 1e-37]], np.float32)
    back = dequantise(*quantise(x))
    assert np.isfinite(back).all()
    assert (back[0, :2] == 0).all()
    np.testing.assert_allclose(back[0, 2:], x[0, 2:], atol=3e38 / 254 * 1.001)
    assert (np.abs(back[1].astype(np.float64) - x[1]) <= 2.0**-127 * 1.001).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numpy_and_jax_give_the_same_bytes(dtype):
    x = np.asarray(jax.numpy.asarray(rows(1, (50, 4, 64), spread=2)).astype(dtype))
    here, there = quantise(x), jax.jit(quantise)(x)
    for ours, theirs in zip(here, there, strict=True):
        assert ours.tobytes() == np.asarray(theirs).tobytes()
    assert dequantise(*here).tobytes() == np.asarray(jax.jit(dequantise)(*there)).tobytes()


def test_a_token_is_quantised_the_same_beside_any_other():
    x = rows(2, (40, 2, 16))
    whole, scales = quantise(x)
    for token in (0, 7, 39):
        alone, scale = quantise(x[token : token + 1])
        assert alone.tobytes() == whole[token].tobytes()
        assert scale.tobytes() == scales[token].tobytes()


def test_nan_and_infinity_are_not_hidden():
    x = np.ones((1, 2, 4), np.float32)
    x[0, 0, 0], x[0, 1, 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        back = dequantise(*quantise(x))
    assert np.isnan(back[0, 0, :2]).all()
    assert not np.isfinite(back[0, 1, 2:]).any()
    assert (back[0, 0, 2:] == 1).all()
    assert (back[0, 1, :2] == 1).all()


@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_device_hides_them_however_many_tokens_there_are(tokens, bad):
    x = rows(3, (tokens, 4, 64), spread=2)
    x[-1, :, 5] = x[tokens // 2, 1] = bad
    with np.errstate(invalid="ignore"):
        scales = quantise(x)[1]
    found = np.asarray(jax.jit(quantise)(x)[1])
    assert not np.isfinite(found[-1, :, 0]).any()
    assert not np.isfinite(found[tokens // 2, 1]).any()
    assert np.array_equal(np.isfinite(found), np.isfinite(scales))


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 3 * 2 * 64), ("bfloat16", 3 * 2 * 32), ("int8", 3 * 2 * 24)])
def test_bytes_per_token_count_the_scales(dtype, num_bytes):
    spec = KVSpec(num_layers=3, num_kv_heads=2, features=16, dtype=dtype)
    assert spec.bytes_per_token == num_bytes
    assert spec.most_bytes_per_token == 3 * 2 * 64
