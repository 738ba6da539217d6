"""How large a pool is, by what a device says of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.aot.planned import planned_mesh
from jdisagg.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig, TransferConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.engine.host_copies import MOST_BYTES
from jdisagg.engine.sizing import DeviceMemory, size_engine
from jdisagg.kv.layout import choose_layout
from tests.unit.engine.support import load

CONFIG = Config(
    model=ModelConfig(max_model_len=64),
    cache=CacheConfig(page_size=4),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
)


def num_pages(memory: DeviceMemory, config: Config = CONFIG, role: Role = Role.UNIFIED) -> int:
    loaded, mesh = load("float32", 1)
    layout = choose_layout(loaded.spec.kv_spec(loaded.kv_dtype), mesh, config.cache.page_size)
    return size_engine(loaded.spec, layout, config, role, lambda: [memory]).num_pages


def test_a_device_that_does_not_tell_its_memory_needs_a_pool_of_a_given_size() -> None:
    with pytest.raises(ConfigError, match=r"--device-memory-utilization: .* does not say how much memory .*--kv-cache-bytes"):
        num_pages(DeviceMemory(limit_bytes=0, in_use_bytes=0))


@pytest.mark.parametrize(
    ("in_use_gib", "advice"),
    [
        (8.99, "raise it, lower --max-num-seqs, --max-num-batched-tokens or --transfer-buffer-bytes, or use more devices"),
        (9.5, "raise it or use more devices"),
        (10.5, "use more devices"),
    ],
)
def test_where_nothing_is_left_it_says_in_gib_what_is_missing_and_only_what_can_help(in_use_gib: float, advice: str) -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=32768))
    with pytest.raises(ConfigError) as caught:
        num_pages(DeviceMemory(limit_bytes=10 * 2**30, in_use_bytes=int(in_use_gib * 2**30)), config)
    said, _, advised = caught.value.message.partition("; ")
    wanted = "--device-memory-utilization: 0.9 of a device's 10.00 GiB is 9.00 GiB, wanted more than the "
    assert said.startswith(f"{wanted}{in_use_gib:.2f} GiB in use (weights) and ")
    assert advised == advice


def test_the_pool_is_what_the_share_leaves_beside_weights_and_steps() -> None:
    whole = num_pages(DeviceMemory(limit_bytes=2**30, in_use_bytes=0))
    assert 0 < num_pages(DeviceMemory(limit_bytes=2**30, in_use_bytes=2**29)) < whole // 2


@pytest.mark.parametrize("role", list(Role))
def test_a_share_leaves_room_for_kv_on_its_way(role: Role) -> None:
    """Published or lent, and arrived; out to host memory, and back. No pool may take the room that they need under load."""
    loaded, mesh = load("float32", 1)
    layout = choose_layout(loaded.spec.kv_spec(loaded.kv_dtype), mesh, CONFIG.cache.page_size)
    memory = DeviceMemory(limit_bytes=2**34, in_use_bytes=0)
    quiet = replace(CONFIG, transfer=TransferConfig(transfer_buffer_bytes=1))
    busy = replace(CONFIG, transfer=TransferConfig(transfer_buffer_bytes=2**30))
    taken = (num_pages(memory, quiet, role) - num_pages(memory, busy, role)) * layout.bytes_per_page
    assert taken == pytest.approx(0 if role is Role.UNIFIED else 2 * 2**30, rel=1e-3)
    copying = replace(quiet, scheduler=replace(CONFIG.scheduler, host_kv_bytes=2**20))
    taken = (num_pages(memory, quiet, role) - num_pages(memory, copying, role)) * layout.bytes_per_page
    assert taken == pytest.approx(2 * MOST_BYTES, rel=1e-3)


@pytest.mark.parametrize("cache", [CacheConfig(page_size=4, num_pages=2), CacheConfig(page_size=1, num_pages=8)])
def test_a_pool_that_holds_no_request_is_refused_with_the_size_that_would_do(cache: CacheConfig) -> None:
    config, memory = replace(CONFIG, model=ModelConfig(), cache=cache), DeviceMemory(limit_bytes=0, in_use_bytes=0)
    with pytest.raises(
        ConfigError, match=r"--num-pages: .* hold (4|7), wanted at least 8; give --num-pages (\d+) or"
    ) as refused:
        num_pages(memory, config)
    enough = int(str(refused.value).split("give --num-pages ")[1].split()[0])
    assert num_pages(memory, replace(config, cache=replace(cache, num_pages=enough))) == enough == -(-8 // cache.page_size) + 1


def test_a_cache_that_every_step_copies_is_as_small_as_on_a_cpu() -> None:
    loaded, _ = load("float32", 1)
    tpu = choose_layout(loaded.spec.kv_spec("bfloat16"), planned_mesh("tpu", 1), CONFIG.cache.page_size)
    assert tpu.is_turned
    sizes = size_engine(loaded.spec, tpu, CONFIG, Role.UNIFIED, lambda: [DeviceMemory(limit_bytes=2**34, in_use_bytes=0)])
    assert sizes.num_pages == 2 * 4 * (64 // 4) + 1


def test_a_context_is_no_longer_than_what_one_step_may_read() -> None:
    """Else every request that names no max_tokens, and so may have all of it, were refused as one that could never run."""
    loaded, mesh = load("float32", 1)
    layout = choose_layout(loaded.spec.kv_spec(loaded.kv_dtype), mesh, CONFIG.cache.page_size)
    cache = replace(CONFIG.cache, num_pages=200)
    own = replace(CONFIG, cache=cache, model=ModelConfig(), scheduler=replace(CONFIG.scheduler, max_num_kv_read_tokens=40))
    assert size_engine(loaded.spec, layout, own, Role.UNIFIED, lambda: None).runner.max_model_len == 40
    said = r"--max-model-len: got 64, .* reads 40 .*; lower it to 40, or give --max-num-kv-read-tokens 64 or more"
    with pytest.raises(ConfigError, match=said):
        size_engine(loaded.spec, layout, replace(own, model=ModelConfig(max_model_len=64)), Role.UNIFIED, lambda: None)
