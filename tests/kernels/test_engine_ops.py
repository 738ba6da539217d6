"""The engine's TPU and GPU ops, interpreted, do what its plain ops do: prompts in tiles, decode rows, shards, int8."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jdisagg.engine.moves import scatter_by_kernel
from jdisagg.engine.ops import GpuOps, RefOps, TpuOps, choose_ops, gpu_layout_refuses, kernels_of, tpu_layout_refuses
from jdisagg.engine.token_index import token_index
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.pool import KVPool
from jdisagg.kv.spec import KVSpec
from jdisagg.models.batch import TokenBatch
from jdisagg.models.sharding import make_mesh
from pallas_kernels import gpu_attention
from pallas_kernels.rows import rows_of_tiles, rows_of_tokens
from tests.kernels.pages import FixedBlocks, FixedGpuBlocks

H, K, D, PAGE, TILE, WIDTH = 4, 2, 8, 16, 16, 4
TABLES = np.array([[5, 2, 7, 0], [3, 6, 0, 0], [1, 0, 0, 0]], np.int32)
LAYER = 1


def prompts():
    """Sequence 0 whole in three tiles, sequence 1 from its token 9 on, a tile of padding."""
    owners = np.array([0, 0, 0, 1, 2], np.int32)
    positions, valid = np.zeros(5 * TILE, np.int32), np.zeros(5 * TILE, bool)
    for first, (start, count) in zip((0, 48), ((0, 40), (9, 11)), strict=True):
        positions[first : first + count], valid[first : first + count] = np.arange(start, start + count), True
    return batch(positions, valid, TABLES[owners], rows_of_tiles(positions, valid, owners)), valid


def singles():
    """One token of each sequence and a padding row."""
    positions, valid = np.array([40, 20, 0], np.int32), np.array([True, True, False])
    return batch(positions, valid, TABLES, rows_of_tokens(positions, valid)), valid


def batch(positions, valid, tables, rows):
    tile = len(positions) // len(tables)
    pages = np.take_along_axis(np.repeat(tables, tile, axis=0), positions[:, None] // PAGE, axis=1)[:, 0]
    return TokenBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        write_pages=np.where(valid, pages, 0),
        write_offsets=np.where(valid, positions % PAGE, 0),
        page_tables=tables,
        rows=jax.tree.map(np.asarray, rows),
    )


def run(ops, pool, steps, rng):
    """What every step's queries see, and the pool's pages but the null page."""
    kv, out = pool.take()[0], []
    for tokens, valid in steps:
        q, k, v = (jnp.asarray(rng.normal(size=(len(valid), heads, D)).astype(np.float32)) for heads in (H, K, K))
        step = jax.jit(lambda kv, q, k, v, tokens: attend(ops, ops.write(kv, LAYER, k, v, tokens), q, tokens))
        kv, seen = step(kv, q, k, v, tokens)
        out.append(np.asarray(seen)[valid])
    return out, [np.asarray(array)[:, 1:] for array in kv.arrays]


def attend(ops, kv, q, tokens):
    return kv, ops.attend(q, kv, LAYER, tokens, scale=0.3, window=11)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "int8"), (4, "float32")])
def test_tpu_ops_write_and_attend_like_the_plain_ones(tp, dtype):
    mesh = make_mesh(jax.devices("cpu"), tp)
    layout = choose_layout(KVSpec(num_layers=2, num_kv_heads=K, features=2 * D, dtype=dtype), mesh, PAGE)
    steps = [prompts(), singles()]
    plain, pages = run(RefOps(layout, mesh), KVPool((layout,), mesh, 8), steps, np.random.default_rng(0))
    tpu = TpuOps(layout, mesh, table=FixedBlocks(32, 2), interpret=pltpu.InterpretParams())
    out, same_pages = run(tpu, KVPool((layout,), mesh, 8), steps, np.random.default_rng(0))
    for a, b in zip(plain, out, strict=True):
        assert a.std() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(pages, same_pages, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (4, "float32"), (2, "int8")])
def test_gpu_ops_write_and_attend_like_the_plain_ones(tp, dtype, monkeypatch):
    mesh = make_mesh(jax.devices("cpu"), tp)
    layout = choose_layout(KVSpec(num_layers=2, num_kv_heads=K, features=2 * D, dtype=dtype), mesh, PAGE)
    layout = replace(layout, heads_major=False)
    steps = [prompts(), singles()]
    plain, pages = run(RefOps(layout, mesh), KVPool((layout,), mesh, 8), steps, np.random.default_rng(0))
    monkeypatch.setattr(gpu_attention, "gpu_blocks_by_rule", FixedGpuBlocks(2))
    gpu = GpuOps(layout, mesh, interpret=True)
    out, same_pages = run(gpu, KVPool((layout,), mesh, 8), steps, np.random.default_rng(0))
    for a, b in zip(plain, out, strict=True):
        assert a.std() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(pages, same_pages, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ({"platform": "tpu", "device_kind": "TPU v6 lite"}, "tpu"),
        ({"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": "9.0"}, "gpu"),
        ({"platform": "cuda", "device_kind": "NVIDIA H200"}, "gpu"),
        ({"platform": "gpu", "device_kind": "NVIDIA B200", "compute_capability": "10.0"}, "gpu"),
        ({"platform": "gpu", "device_kind": "NVIDIA L4", "compute_capability": "8.9"}, "ref"),
        ({"platform": "gpu", "device_kind": "AMD Instinct MI300X", "compute_capability": "gfx942"}, "ref"),
        ({"platform": "cpu", "device_kind": "cpu"}, "ref"),
    ],
)
def test_devices_get_the_kernels_that_were_made_for_them(device, wanted):
    assert kernels_of(SimpleNamespace(**device)) == wanted


@pytest.mark.parametrize(("change", "said"), [({}, None), ({"dtype": "float16"}, "float16"), ({"features": 2 * 96}, None)])
def test_layouts_that_the_gpu_kernel_serves(change, said):
    spec = replace(KVSpec(num_layers=2, num_kv_heads=8, features=256, dtype="bfloat16"), **change)
    layout = replace(choose_layout(spec, make_mesh(jax.devices("cpu"), 1), 16), as_bits=False)
    assert "tokens-major" in (gpu_layout_refuses(layout) or "")
    reason = gpu_layout_refuses(replace(layout, heads_major=False))
    assert (reason is None) if said is None else (said in reason)


def test_a_cache_too_large_for_the_gpu_kernel_is_served_by_plain_attention_and_said(caplog):
    mesh = make_mesh(jax.devices("cpu"), 1)
    spec = KVSpec(num_layers=8, num_kv_heads=K, features=2 * D, dtype="int8")
    layout = replace(choose_layout(spec, mesh, PAGE), heads_major=False)
    kv = layout.abstract(3 * 2**31 // (2 * 8 * PAGE * K * 2 * D))
    tokens, valid = singles()
    q = jax.ShapeDtypeStruct((len(valid), H, D), jnp.bfloat16)
    ops = GpuOps(layout, mesh)
    out = jax.eval_shape(lambda kv, q: ops.attend(q, kv, LAYER, tokens, scale=0.3, window=None), kv, q)
    assert out.shape == q.shape
    assert "2 to 4 GiB" in caplog.text


@pytest.mark.parametrize(
    ("change", "page_size", "said"),
    [
        ({}, 16, None),
        ({"features": 128}, 16, None),
        ({"dtype": "float32"}, 8, None),
        ({"dtype": "int8"}, 128, None),
        ({"dtype": "int8"}, 16, "multiple of 128: set --page-size"),
        ({}, 8, "multiple of 16: set --page-size"),
        ({"dtype": "float16"}, 16, "float16"),
        ({"features": 192}, 16, "head dimension 96"),
    ],
)
def test_layouts_that_the_kernels_serve(change, page_size, said):
    spec = replace(KVSpec(num_layers=2, num_kv_heads=8, features=256, dtype="bfloat16"), **change)
    cpu = choose_layout(spec, make_mesh(jax.devices("cpu"), 1), page_size)
    reason = tpu_layout_refuses(replace(cpu, as_bits=False, heads_major=True))
    assert (reason is None) if said is None else (said in reason)


@pytest.mark.parametrize(
    ("platform", "kind", "said"),
    [("cpu", "cpu", ""), ("gpu", "NVIDIA L4", "slower than the kernels, as there are none for NVIDIA L4")],
)
def test_other_platforms_get_plain_ops(platform, kind, said, caplog):
    layout = choose_layout(
        KVSpec(num_layers=2, num_kv_heads=8, features=256, dtype="float32"), make_mesh(jax.devices("cpu"), 1), 16
    )
    device = SimpleNamespace(platform=platform, device_kind=kind, compute_capability="8.9")
    assert isinstance(choose_ops(layout, SimpleNamespace(devices=np.array([device]))), RefOps)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "int8"), (4, "int8"), (1, "float32")])
@pytest.mark.parametrize("begin", [0, 5, 31])
def test_pieces_are_stored_by_kernel_where_the_plain_scatter_puts_them(tp, dtype, begin):
    mesh, width = make_mesh(jax.devices("cpu"), tp), 48
    layout = choose_layout(KVSpec(num_layers=3, num_kv_heads=K, features=2 * D, dtype=dtype), mesh, 32)
    rng = np.random.default_rng(begin)

    def filled(like):
        values = rng.normal(size=like.shape) * 50
        return jnp.asarray(values.astype(like.dtype))

    cache, rows = (jax.tree.map(filled, shapes) for shapes in (layout.abstract(7), layout.abstract_rows(width)))
    where = token_index((4, 2, 6), begin, begin + 41, page_size=32, width=width)
    plain = layout.scatter_tokens(mesh, cache, rows, where[0], where[1])
    kernel = partial(scatter_by_kernel, layout, mesh, interpret=pltpu.InterpretParams())
    stored = jax.jit(kernel)(cache, rows, jnp.asarray(where))
    for before, a, b in zip(cache.arrays, plain.arrays, stored.arrays, strict=True):
        assert not np.array_equal(before, a)
        assert np.array_equal(np.asarray(a)[:, 1:], np.asarray(b)[:, 1:])


def test_whole_pages_anywhere_are_stored_by_kernel():
    mesh = make_mesh(jax.devices("cpu"), 1)
    layout = choose_layout(KVSpec(num_layers=2, num_kv_heads=K, features=2 * D, dtype="int8"), mesh, 32)
    rows = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), layout.abstract_rows(128))
    where = np.stack([np.repeat([5, 1, 3, 0], 32), np.tile(np.arange(32), 4)]).astype(np.int32)
    cache = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), layout.abstract(7))
    stored = jax.jit(partial(scatter_by_kernel, layout, mesh, interpret=pltpu.InterpretParams()))(cache, rows, where)
    for array in stored.arrays:
        pages = np.moveaxis(np.asarray(array), 1, 0)
        assert [bool(page.all()) for page in pages][1:] == [True, False, True, False, True, False]
