"""KV layouts and the pool on every axis order and number of shards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.config import CacheConfig, Config, SchedulerConfig
from jdisagg.core.errors import ConfigError, NoMemory
from jdisagg.core.requests import Role
from jdisagg.engine import device
from jdisagg.engine.build import make_runner
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.pool import KVPool, num_pages_for_bytes
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from tests.unit.engine.support import load

SPEC = KVSpec(num_layers=2, num_kv_heads=2, features=4, dtype="float32")


@pytest.mark.parametrize("heads_major", [True, False])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_scattered_tokens_are_gathered_again(heads_major, num_shards):
    mesh = make_mesh(jax.devices("cpu"), num_shards)
    layout = KVLayout(spec=SPEC, page_size=4, num_shards=num_shards, heads_major=heads_major, as_bits=False)
    kv = KVGroup(jnp.zeros(layout.abstract(6).data.shape, layout.storage_dtype))
    rows = np.random.default_rng(0).normal(size=(2, 5, 2, 4)).astype(np.float32)
    pages, offsets = np.array([5, 5, 2, 1, 1]), np.array([0, 3, 2, 1, 0])
    kv = layout.scatter_tokens(mesh, kv, KVGroup(jnp.asarray(rows)), pages, offsets)
    np.testing.assert_array_equal(layout.gather_tokens(mesh, kv, pages, offsets).data, rows)
    assert np.count_nonzero(kv.data) == np.count_nonzero(rows) * layout.num_replicas


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [("float32", [(2, 10, 1, 8, 4)]), ("bfloat16", [(2, 10, 1, 8, 4)]), ("int8", [(2, 10, 1, 8, 4), (2, 10, 1, 8, 2)])],
)
def test_the_arrays_are_sharded_by_head_and_their_bytes_are_what_the_layout_says(dtype, shapes):
    mesh = make_mesh(jax.devices("cpu"), 2)
    layout = choose_layout(replace(SPEC, dtype=dtype), mesh, 8)
    pool = KVPool((layout,), mesh, 10)
    (kv,) = pool.take()
    num_bytes = sum(array.nbytes for array in kv.arrays)
    assert num_bytes == 10 * layout.bytes_per_page
    assert num_pages_for_bytes((layout,), num_bytes + 1) == 10
    assert [array.addressable_shards[0].data.shape for array in kv.arrays] == shapes


def test_taken_arrays_cannot_be_taken_or_put_twice():
    mesh = make_mesh(jax.devices("cpu"), 1)
    pool = KVPool((choose_layout(SPEC, mesh, 8),), mesh, 2)
    kv = pool.take()
    with pytest.raises(AssertionError, match="already taken"):
        pool.take()
    pool.put(kv)
    with pytest.raises(AssertionError, match="twice"):
        pool.put(kv)


def test_sizes_that_settings_let_nobody_have_are_our_own_fault():
    mesh = make_mesh(jax.devices("cpu"), 3)
    with pytest.raises(AssertionError, match="do not divide over 3 shards"):
        choose_layout(SPEC, mesh, 8)
    one = make_mesh(jax.devices("cpu"), 1)
    with pytest.raises(AssertionError, match="page 0 is never used"):
        KVPool((choose_layout(SPEC, one, 8),), one, 1)


@pytest.mark.parametrize(("given", "may_pass"), [({}, True), ({"num_pages": 8}, False), ({"kv_cache_bytes": 2**20}, False)])
def test_a_pool_that_does_not_fit_is_a_bad_configuration_where_somebody_gave_its_size(given, may_pass, monkeypatch):
    """Else the device's memory is somebody else's now: a supervisor tries again."""

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    loaded = load()
    monkeypatch.setattr(jax, "block_until_ready", refuse)
    with pytest.raises(ConfigError, match=r"^--num-pages: \d+ pages of KV take .* 5 bytes") as refused:
        make_runner(*loaded, Config(cache=CacheConfig(page_size=4, **given)), Role.UNIFIED)
    assert isinstance(refused.value, NoMemory) is may_pass


def test_slots_that_do_not_fit_beside_the_pool_are_named_by_their_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    loaded = load()
    monkeypatch.setattr(device.slots, "new_state", refuse)
    config = Config(cache=CacheConfig(page_size=4, num_pages=8), scheduler=SchedulerConfig(max_num_seqs=3))
    with pytest.raises(NoMemory, match=r"^--max-num-seqs: no memory is left for what is kept of 3 requests .* 5 bytes"):
        make_runner(*loaded, config, Role.UNIFIED)


def test_too_few_bytes_are_refused_by_the_name_of_their_flag():
    config = Config(cache=CacheConfig(page_size=4, kv_cache_bytes=10))
    with pytest.raises(ConfigError, match=r"--kv-cache-bytes: got 10, wanted at least \d+ bytes: 2 pages"):
        make_runner(*load(), config, Role.UNIFIED)


def test_a_pool_that_shortens_requests_unasked_says_how_large_it_had_to_be(caplog: pytest.LogCaptureFixture) -> None:
    loaded, mesh = load()
    runner = make_runner(loaded, mesh, Config(cache=CacheConfig(page_size=4, num_pages=5)), Role.UNIFIED)
    assert runner.max_model_len == 16
    needed = loaded.spec.max_model_len // 4 + 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"5 KV pages of 4 tokens hold 16 of the model's {loaded.spec.max_model_len}: ")
    assert f"--num-pages {needed} " in line
    caplog.clear()
    make_runner(loaded, mesh, Config(cache=CacheConfig(page_size=4, num_pages=needed)), Role.UNIFIED)
    assert not caplog.records
