"""A start for which a device has no memory left is one line that says what to change."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import pytest

from jdisagg.core.config import CacheConfig, Config
from jdisagg.core.errors import NoMemory
from jdisagg.core.requests import Role
from jdisagg.engine import warmup
from jdisagg.engine.build import make_runner
from jdisagg.engine.runner import ModelRunner
from tests.unit.engine.support import load


@pytest.fixture
def runner() -> ModelRunner:
    return make_runner(*load(), Config(cache=CacheConfig(page_size=4, num_pages=8)), Role.UNIFIED)


def test_a_step_for_which_no_memory_is_left_is_named_with_what_to_lower(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = warmup._run

    def refuse(device: Any, executable: Any) -> Any:
        if executable.name != "prefill":
            return run(device, executable)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.\nof these ..")

    monkeypatch.setattr(warmup, "_run", refuse)
    with pytest.raises(NoMemory) as refused:
        warmup.warm_up(runner)
    said = refused.value.message
    assert said.startswith("--max-num-batched-tokens: no memory is left to run prefill (")
    assert "--kv-cache-bytes" in said
    assert said.endswith(" (RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.)")


def test_what_else_fails_in_a_step_is_no_bad_configuration(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    monkeypatch.setattr(warmup, "_run", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="launch failed"):
        warmup.warm_up(runner)
