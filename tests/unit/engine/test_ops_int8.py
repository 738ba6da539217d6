"""int8 KV in the attention ops: shards do what one device does, what is stored is what was said, and NaN is found."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.engine.nan_search import NanSearch
from jdisagg.engine.ops import RefOps
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.pool import KVPool
from jdisagg.kv.quantise import dequantise, quantise
from jdisagg.kv.spec import KVSpec
from jdisagg.models.batch import TokenBatch
from jdisagg.models.sharding import make_mesh
from pallas_kernels.rows import Rows
from tests.unit.engine.support import Driver, admit, chunk_up, make, prompt_of

T, H, K, D, PAGE = 6, 8, 2, 16, 4
TABLE = np.array([3, 1], np.int32)


def batch(positions):
    at = np.asarray(positions, np.int32)
    return TokenBatch(
        token_ids=np.zeros(len(at), np.int32),
        positions=at,
        write_pages=TABLE[at // PAGE],
        write_offsets=at % PAGE,
        page_tables=np.tile(TABLE, (len(at), 1)),
        rows=Rows(np.arange(len(at), dtype=np.int32), np.ones_like(at), at + 1),
    )


def run(tp, *, dtype, heads_major=True):
    """(attention of T tokens over themselves, the rows that are stored)."""
    mesh = make_mesh(jax.devices("cpu"), tp)
    spec = KVSpec(num_layers=2, num_kv_heads=K, features=2 * D, dtype="int8")
    layout = replace(choose_layout(spec, mesh, PAGE), heads_major=heads_major)
    pool, ops = KVPool((layout,), mesh, 5), RefOps(layout, mesh, block_tokens=4)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(T, H, D)).astype(np.float32)).astype(dtype)
    k, v = (jnp.asarray(rng.normal(size=(T, K, D)).astype(np.float32)).astype(dtype) for _ in range(2))

    @jax.jit
    def step(kv, q, k, v, tokens):
        kv = ops.write(kv, 1, k, v, tokens)
        rows = layout.gather_tokens(mesh, kv, tokens.write_pages, tokens.write_offsets)
        return ops.attend(q, kv, 1, tokens, scale=0.25, window=None), rows

    out, rows = step(pool.take()[0], q, k, v, batch(range(T)))
    return (q, k, v), np.asarray(out, np.float64), jax.device_get(rows)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("heads_major", [True, False])
def test_what_is_stored_is_the_quantised_token_and_attention_is_over_what_it_means(tp, heads_major):
    (q, k, v), out, rows = run(tp, dtype=jnp.float32, heads_major=heads_major)
    data, scales = quantise(np.concatenate([k, v], axis=-1))
    assert rows.data[1].tobytes() == data.tobytes()
    assert rows.scales[1].tobytes() == scales.tobytes()
    assert not rows.data[0].any()
    kept = dequantise(data, scales).astype(np.float64)
    for token in range(T):
        for head in range(H):
            keys, values = np.split(kept[: token + 1, head // (H // K)], 2, axis=-1)
            scores = keys @ np.asarray(q, np.float64)[token, head] * 0.25
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(out[token, head], weights / weights.sum() @ values, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_activations_meet_int8_with_no_more_error_than_their_own(dtype):
    (q, k, v), out, _ = run(1, dtype=dtype)
    kept = dequantise(*quantise(np.concatenate([k, v], axis=-1))).astype(np.float64)
    keys, values = np.split(kept[:, 0], 2, axis=-1)
    scores = keys @ np.asarray(q, np.float64)[-1, 0] * 0.25
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(out[-1, 0], weights / weights.sum() @ values, atol=2e-2 if dtype == jnp.bfloat16 else 2e-3)


def test_a_nan_is_found_in_the_scales_of_its_layer_part_and_token():
    runner, prompt, pages = make(kv_dtype="int8"), prompt_of(21), (tuple(range(1, 9)),)
    driver = Driver(runner)
    driver.run(admit=(admit(0, range(1, 17), prompt),), prefill=chunk_up(0, prompt, [21]))
    search = NanSearch(runner.export_tokens, runner.chunk_tokens)
    assert search(pages, 21).startswith("in none of the 2 layers' KV")
    piece = runner.export_tokens(pages, 8, 16)
    scales = np.array(piece.scales)
    scales[1, 2, 0, 1] = np.nan
    runner.import_tokens(pages, replace(piece, scales=jax.device_put(scales, piece.data.sharding)))
    assert search(pages, 21) == "first in layer 1's values of token 10"
    assert all("NaN" in one.bad for one in driver.run(decode=(0,)).sampled)
