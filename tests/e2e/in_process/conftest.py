"""Runners of the small model, compiled once: tests make as many engines on them as they like, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from jdisagg.core.config import Numerics
from jdisagg.core.requests import Role
from jdisagg.engine.runner import ModelRunner
from jdisagg.models.load import LoadedModel
from jdisagg.roles import engine_loop
from tests.e2e.in_process.engines import EnginePair
from tests.e2e.in_process.runners import BUDGET, MAX_LEN, build_runner


@pytest.fixture(scope="module", autouse=True)
def no_sleep() -> Iterator[None]:
    """One thread steps several engines: an idle one must not make the others wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_loop, "IDLE_WAIT_S", 0.0)
        yield


@dataclass(frozen=True)
class Runners:
    """Everything compiled for one numerics level."""

    loaded: LoadedModel
    unified: ModelRunner
    pair: tuple[ModelRunner, ModelRunner]

    def make_pair(self, **options: Any) -> EnginePair:
        """P and D, to be closed."""
        return EnginePair(self.pair, **options)


def _runners(numerics: Numerics, *, pair_on: tuple[int, int], most_tokens: int) -> Runners:
    loaded, unified = build_runner(numerics, Role.UNIFIED, most_tokens=most_tokens)
    prefill, decode = (
        build_runner(numerics, role, device=device, most_tokens=most_tokens)[1]
        for role, device in zip((Role.PREFILL, Role.DECODE), pair_on, strict=True)
    )
    return Runners(loaded, unified, (prefill, decode))


@pytest.fixture(scope="session")
def exact() -> Runners:
    return _runners(Numerics.EXACT, pair_on=(1, 2), most_tokens=MAX_LEN)


@pytest.fixture(scope="session")
def fast() -> Runners:
    """All on one device and with small steps: there are many more executables to compile."""
    return _runners(Numerics.FAST, pair_on=(0, 0), most_tokens=BUDGET)
