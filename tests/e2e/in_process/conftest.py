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
from tests.e2e.in_process.engines import EnginePair, build_runner


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
        return EnginePair(self.pair, self.loaded, **options)


def _runners(numerics: Numerics) -> Runners:
    loaded, unified = build_runner(numerics, Role.UNIFIED)
    pair = tuple(build_runner(numerics, role, device=1 + i)[1] for i, role in enumerate((Role.PREFILL, Role.DECODE)))
    return Runners(loaded, unified, (pair[0], pair[1]))


@pytest.fixture(scope="session")
def exact() -> Runners:
    return _runners(Numerics.EXACT)


@pytest.fixture(scope="session")
def fast() -> Runners:
    return _runners(Numerics.FAST)
