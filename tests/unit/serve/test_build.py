"""What a colocated worker refuses before it loads anything, and a worker for which no memory is left once it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import pytest

from jdisagg.aot.planned import planned_mesh
from jdisagg.api.http.version import package_version
from jdisagg.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from jdisagg.core.errors import ConfigError, NoMemory
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.engine.costs import RetractionCost
from jdisagg.serve import build, engine_core
from jdisagg.serve.engine_core import Core, build_core
from jdisagg.transfer.device_put import DevicePutPublisher
from jdisagg.transfer.target import PieceError

CONFIG = Config(role="colocated", model=ModelConfig(model="demo"))


class Loads(Exception):
    """It got as far as the first engine."""


def start(config: Config, platform: str, count: int = 1) -> NoReturn:
    def load(*arguments: Any, **named: Any) -> NoReturn:
        raise Loads

    devices = [planned_mesh(platform, 1).devices.flat[0] for _ in range(count)]
    loop = asyncio.new_event_loop()
    try:
        build._colocated(config, devices, load, loop=loop, on_crash=lambda error: None)
    finally:
        loop.close()
    raise AssertionError


def test_shares_of_one_device_for_both_engines_are_refused_before_anything_is_loaded() -> None:
    for share in (0.9, 0.45):
        config = replace(CONFIG, cache=CacheConfig(device_memory_utilization=share))
        with pytest.raises(ConfigError, match=rf"--device-memory-utilization: {share} .*--kv-cache-bytes or --num-pages"):
            start(config, "cuda")


@pytest.mark.parametrize("cache", [CacheConfig(num_pages=100), CacheConfig(kv_cache_bytes=2**26)])
def test_pools_of_given_sizes_share_a_device(cache: CacheConfig) -> None:
    with pytest.raises(Loads):
        start(replace(CONFIG, cache=cache), "cuda")


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 2), ("tpu", 1)])
def test_a_cpu_devices_of_their_own_and_pools_that_are_no_shares_go_on(platform: str, count: int) -> None:
    with pytest.raises(Loads):  # on TPU the demo's KV is turned in every step, and its pool as small as on a CPU
        start(CONFIG, platform, count)


def refuse(*_: object) -> NoReturn:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")


NO_PIECE = r"^--transfer-chunk-tokens: no memory is left for a piece of KV .* 5 bytes"


def refuse_to_place(*_: object) -> NoReturn:
    raise PieceError("device", "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")


@pytest.mark.parametrize("refusal", [refuse, refuse_to_place])
def test_engines_of_one_process_between_which_there_is_no_room_for_a_piece_end_the_start(
    refusal: Callable[..., NoReturn],
) -> None:
    source: Any = SimpleNamespace(runner=SimpleNamespace(device=SimpleNamespace(empty_piece=refusal)))
    with pytest.raises(NoMemory, match=NO_PIECE):
        build._exchange(DevicePutPublisher(list[Any]().append), source, source)


def test_an_engine_that_has_no_room_to_try_its_steps_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "warm_up", lambda runner, **_: [])
    monkeypatch.setattr(engine_core, "measure_retraction_cost", refuse)
    config = replace(CONFIG, cache=CacheConfig(num_pages=100), scheduler=SchedulerConfig(host_kv_bytes=2**20))
    with pytest.raises(NoMemory, match=NO_PIECE):
        build_core(config, Role.DECODE, jax.devices(), tp=1, metrics=Metrics(), worker="w", tokenizer=None)


@pytest.mark.parametrize(("copy_s_per_token", "is_used"), [(2.0, True), (2.1, False)])
def test_host_memory_is_used_where_the_way_out_and_back_is_not_slower_than_computing_again(
    copy_s_per_token: float, is_used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = RetractionCost(copy_s_per_token=copy_s_per_token, recompute_s_per_token=4.0)
    monkeypatch.setattr(engine_core, "warm_up", lambda runner, **_: [])
    monkeypatch.setattr(engine_core, "measure_retraction_cost", lambda runner: cost)
    config = replace(CONFIG, cache=CacheConfig(num_pages=100), scheduler=SchedulerConfig(host_kv_bytes=2**20))
    with caplog.at_level("INFO"):
        core = build_core(config, Role.DECODE, jax.devices(), tp=1, metrics=Metrics(), worker="w", tokenizer=None)
    assert (core.scheduler.snapshot()["host_tokens"]["total"] > 0) == is_used
    (said,) = (message for message in caplog.messages if "host memory for KV" in message)
    assert said.endswith("4000000.0 us to compute again" + ("" if is_used else ", which is quicker: it stays unused"))


def test_hello_says_which_build_a_worker_runs() -> None:
    facts: dict[str, Any] = {"worker": "w", "epoch": "e", "kv_spec": None, "grammar_kinds": frozenset(), "bits": ""}
    core: Any = SimpleNamespace(loaded=SimpleNamespace(fingerprint="f", fingerprint_parts=()), config=CONFIG, **facts)
    assert Core.identity(core, ()).build == package_version()


def test_programs_are_compiled_beside_each_other_for_accelerators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "usable_cores", lambda: 6)
    assert [engine_core._cores_to_compile(platform) for platform in ("cpu", "tpu", "gpu", "cuda")] == [1, 6, 6, 6]
