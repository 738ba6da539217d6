"""A start for which a device has no memory left is one line that says what to change."""

from __future__ import annotations

from threading import Event, Lock
from typing import Any, NoReturn

import jax
import pytest

from jdisagg.core.config import CacheConfig, Config, SchedulerConfig
from jdisagg.core.errors import NoMemory
from jdisagg.core.requests import Role
from jdisagg.engine import warmup
from jdisagg.engine.build import make_runner
from jdisagg.engine.executables import executables
from jdisagg.engine.runner import ModelRunner
from tests.unit.engine.support import load


@pytest.fixture
def runner() -> ModelRunner:
    config = Config(
        cache=CacheConfig(page_size=4, num_pages=8), scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    )
    return make_runner(*load(), config, Role.UNIFIED)


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


def test_a_compiler_that_finds_too_little_memory_is_told_like_a_step_that_does(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libtpu's does; what comes behind it is not compiled any more, and nothing was run."""
    lower, tried, ran = runner.device.lower, list[str](), list[str]()

    class Refused:
        def __init__(self, name: str) -> None:
            self._name = name

        def compile(self) -> NoReturn:
            tried.append(self._name)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\nProgram ..")

    monkeypatch.setattr(runner.device, "lower", lambda name, what: Refused(name) if name == "admit" else lower(name, what))
    monkeypatch.setattr(warmup, "_run", lambda device, executable: ran.append(executable.name))
    with pytest.raises(NoMemory, match=r"no memory is left to run admit \(.*\(RESOURCE_EXHAUSTED: .* space hbm.\)$"):
        warmup.warm_up(runner, num_cores=2)
    assert (tried, ran) == (["admit"], [])


def test_as_many_are_compiled_at_a_time_as_there_are_cores(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, lock, two, three = runner.device.lower, Lock(), Event(), Event()
    now, most = 0, 0

    class Watched:
        def __init__(self, lowered: Any) -> None:
            self._lowered = lowered

        def compile(self) -> Any:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
                (three if now > 2 else two if now == 2 else Event()).set()
            if two.wait(20.0):  # the first one, for the second, however fast it would be
                three.wait(0.1)
            compiled = self._lowered.compile()
            with lock:
                now -= 1
            return compiled

    monkeypatch.setattr(runner.device, "lower", lambda name, what: Watched(lower(name, what)))
    warmed = warmup.warm_up(runner, num_cores=2)
    assert len(warmed) == len(list(executables(runner.shape, runner.device.shape)))
    assert most == 2


def test_what_else_fails_in_a_step_is_no_bad_configuration(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    monkeypatch.setattr(warmup, "_run", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="launch failed"):
        warmup.warm_up(runner)
