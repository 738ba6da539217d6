"""KV write, gather and scatter, every implementation, against NumPy; the TPU kernels race-checked, and with planted faults."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_gather, tpu_scatter
from pallas_kernels.tpu_scales import store_scales
from pallas_kernels.transfer import gather, scatter
from pallas_kernels.write import write
from tests.kernels.test_faults import RAISED_RACE

L, P, K, S, F = 2, 12, 2, 16, 32
STRICT = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
RNG = np.random.default_rng(0)
DTYPES = [np.float32, ml_dtypes.bfloat16, np.int8]
BOTH = [("ref", False), ("tpu", STRICT)]


def numbers(shape, dtype):
    return RNG.integers(-127, 128, shape).astype(dtype) if dtype == np.int8 else RNG.normal(size=shape).astype(dtype)


def pool(dtype, heads_major, page_size=S):
    """[L, P, S, K, F] in the wanted order, NaN where floats can be."""
    empty = np.full((L, P, page_size, K, F), 77 if dtype == np.int8 else np.nan).astype(dtype)
    return empty.swapaxes(2, 3) if heads_major else empty


def same(a, b):
    """Equal element for element, NaN to NaN (which NumPy does not do for bfloat16)."""
    np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))


def tokens_major(array, heads_major):
    return np.asarray(array).swapaxes(2, 3) if heads_major else np.asarray(array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("implementation", "interpret", "heads_major"), [("ref", False, True), ("ref", False, False), ("tpu", STRICT, True)]
)
def test_write_stores_the_rows_and_nothing_else(dtype, implementation, interpret, heads_major, capfd):
    # 19 tokens across pages 3 and 7, decode tokens amid them, padding on the null page and one page that does not exist.
    chunk = [(3, offset) for offset in range(5, 16)] + [(7, offset) for offset in range(8)]
    places = [(9, 15), *chunk, (0, 0), (2, 0), (0, 0), (P, 3), (0, 1)]
    RNG.shuffle(places)
    pages, offsets = np.array(places, np.int32).T
    rows = numbers((len(places), K, F), np.float32 if dtype != np.int8 else np.int8)
    before = pool(dtype, heads_major, 32)
    run = jax.jit(
        partial(write, heads_major=heads_major, implementation=implementation, interpret=interpret, most_slabs=8),
        donate_argnums=0,
    )
    out = tokens_major(run(jnp.asarray(before), 1, rows, pages, offsets), heads_major)
    wanted = tokens_major(before, heads_major).copy()
    for row, page, offset in zip(rows, pages, offsets, strict=True):
        if page < P:
            wanted[1, page, offset] = row.astype(dtype)
    same(out[:, 1:], wanted[:, 1:])
    assert "race" not in capfd.readouterr().out.lower()


def test_scales_are_stored_and_nothing_else(capfd):
    chunk = [(3, offset) for offset in range(5, 16)] + [(7, offset) for offset in range(8)]
    places = [(9, 15), *chunk, (0, 0), (2, 0), (0, 0), (P, 3), (0, 1)]
    RNG.shuffle(places)
    pages, offsets = np.array(places, np.int32).T
    rows, before = (RNG.uniform(0.0, 0.02, (*shape, 2)).astype(np.float32) for shape in ((len(places), K), (L, P, K, S)))
    rows[0], before[1, 3, 0, 2] = np.nan, np.nan  # of a token that is broken: it must stay so
    run = jax.jit(partial(store_scales, most_pages=8, interpret=STRICT), donate_argnums=0)
    out = tokens_major(run(jnp.asarray(before), 1, rows, pages, offsets), True)
    wanted = tokens_major(before, True).copy()
    for row, page, offset in zip(rows, pages, offsets, strict=True):
        if page < P:
            wanted[1, page, offset] = row
    np.testing.assert_array_equal(out[:, 1:], wanted[:, 1:])
    assert "race" not in capfd.readouterr().out.lower()
    nowhere = store_scales(jnp.asarray(before), 1, rows[:2], jnp.full(2, P), offsets[:2], most_pages=2, interpret=STRICT)
    np.testing.assert_array_equal(np.asarray(nowhere), before)


def test_a_write_to_pages_that_do_not_exist_changes_nothing():
    kv, rows = numbers((L, P, K, S, F), np.float32), numbers((3, K, F), np.float32)
    pages, offsets = np.array([P, -1, 2**30], np.int32), np.zeros(3, np.int32)
    for implementation, interpret in BOTH:
        out = write(
            jnp.asarray(kv), 1, rows, pages, offsets, heads_major=True, implementation=implementation, interpret=interpret
        )
        assert np.array_equal(np.asarray(out), kv)


@pytest.mark.parametrize(("stored", "dtype"), [(np.float32, DTYPES[1]), (DTYPES[1], None), (np.int8, None)])
@pytest.mark.parametrize(
    ("implementation", "interpret", "heads_major"), [*[(*one, True) for one in BOTH], ("ref", False, False)]
)
def test_gather_takes_the_pages_in_order_and_converts(heads_major, stored, dtype, implementation, interpret, capfd):  # noqa: PLR0917
    kv, pages = numbers((L, P, K, S, F) if heads_major else (L, P, S, K, F), stored), np.array([7, 2, 11, 5, 3], np.int32)
    out = jax.jit(partial(gather, heads_major=heads_major, dtype=dtype, implementation=implementation, interpret=interpret))(
        kv, pages
    )
    wanted = tokens_major(kv, heads_major)[:, pages].reshape(L, -1, K, F).astype(dtype or stored)
    same(out, wanted)
    assert "race" not in capfd.readouterr().out.lower()


@pytest.mark.parametrize(("implementation", "interpret"), BOTH)
def test_gather_of_integers_gives_what_they_mean(implementation, interpret):
    kv, pages = numbers((L, P, K, S, F), np.int8), np.array([7, 2, 11], np.int32)
    scales = RNG.uniform(0.001, 0.02, (L, P, K, S, 2)).astype(np.float32)
    out = gather(kv, pages, heads_major=True, scales=jnp.asarray(scales), implementation=implementation, interpret=interpret)
    meant = (kv.reshape(L, P, K, S, 2, -1) * scales[..., None].astype(np.float64)).reshape(kv.shape)
    np.testing.assert_allclose(np.asarray(out), meant.swapaxes(2, 3)[:, pages].reshape(L, -1, K, F), rtol=1e-6)


@pytest.mark.parametrize(
    ("span", "stored", "dtype"),
    [
        *[(span, ml_dtypes.bfloat16, np.float32) for span in ((0, 80), (5, 70), (16, 64), (20, 23), (9, 9))],
        ((31, 33), np.int8, np.int8),
    ],
)
@pytest.mark.parametrize(("implementation", "interpret"), BOTH)
def test_scatter_stores_the_range_and_nothing_else(span, stored, dtype, implementation, interpret, capfd):  # noqa: PLR0917
    before, rows = pool(stored, True), numbers((L, 5 * S, K, F), dtype)
    pages = np.array([7, 2, 11, 5, 3], np.int32)
    run = jax.jit(partial(scatter, heads_major=True, implementation=implementation, interpret=interpret), donate_argnums=0)
    out = tokens_major(run(jnp.asarray(before), rows, pages, *span), True)
    wanted = tokens_major(before, True).copy()
    for token in range(*span):
        wanted[:, pages[token // S], token % S] = rows[:, token].astype(stored)
    same(out, wanted)
    assert "race" not in capfd.readouterr().out.lower()


def no_wait(wait, use):
    use()


def late_wait(wait, use):
    use()
    wait()


@pytest.mark.parametrize("fault", [no_wait, late_wait])
@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_copy_that_is_not_waited_for_is_caught(fault, kernel, capfd, monkeypatch):
    monkeypatch.setattr(tpu_gather if kernel == "gather" else tpu_scatter, "arrive", fault)
    # Steps of one page: the third is the first whose buffer was used before.
    kv, pages = numbers((4, P, K, 512, 128), np.float32), np.array([7], np.int32)
    wanted = kv[:, pages]

    def moved():
        if kernel == "gather":
            return tpu_gather.gather_pages(kv, pages, dtype=np.float32, interpret=STRICT)
        span, empty = np.array([0, 512], np.int32), jnp.zeros_like(kv)
        return tpu_scatter.scatter_pages(empty, wanted, pages, span, interpret=STRICT)[:, pages]

    try:
        right = np.array_equal(np.asarray(moved()), wanted)
    except jax.errors.JaxRuntimeError as error:
        assert RAISED_RACE in str(error)  # noqa: PT017 - jax before 0.12 raises nothing
        return
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "race" in capfd.readouterr().out.lower() or not right


@pytest.mark.parametrize("kernel", [write, scatter])
def test_what_the_tpu_kernels_cannot_do_is_refused_with_a_reason(kernel):
    index = jnp.zeros(8, jnp.int32)
    kv, rows = jnp.zeros((L, P, K, 8, 128), jnp.bfloat16), jnp.zeros((8, K, 128), jnp.bfloat16)
    arguments = (kv, 0, rows, index, index) if kernel is write else (kv, rows[None], index[:1], 0, 8)
    with pytest.raises(ValueError, match="wanted a multiple of 16"):
        kernel(*arguments, heads_major=True, implementation="tpu")
    with pytest.raises(ValueError, match="heads-major"):
        kernel(*arguments, heads_major=False, implementation="tpu")
