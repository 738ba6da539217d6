"""Fleets shared by the end-to-end tests of a session: one tiny model, a unified reference, one P + D pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ServerProcess
from tests.e2e.tiny_model import make_tiny_model

MAX_MODEL_LEN = 256
SMALL = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--page-size", "16", "--num-pages", "400"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--transfer-chunk-tokens", "64"),
)
PATIENT = ("--dead-after-s", "20")  # where nothing may have to recover: a machine that stands still is not a dead worker


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_model_len=512)


Start = Callable[..., ServerProcess]


@contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """Yields `start(name, *flags) -> ServerProcess` (not yet ready); everything started is ended at exit."""
    started: list[ServerProcess] = []

    def start(name: str, *flags: str, **options: Any) -> ServerProcess:
        process = ServerProcess(*flags, log=directory / f"{name}-{len(started)}.log", **options)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):
            process.stop()


@pytest.fixture(scope="session")
def exact_flags(tiny_model: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_model), "--numerics", "exact", *SMALL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as starter:
        yield starter


@pytest.fixture(scope="session")
def unified(tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    """The reference of every exactness test."""
    with starting(tmp_path_factory.mktemp("unified")) as starter:
        yield starter("unified", "--role", "unified", *exact_flags, env={"JAX_LOG_COMPILES": "1"}).wait_ready()


class Pair:
    """One prefill and one decode process, no router."""

    def __init__(self, prefill: ServerProcess, decode: ServerProcess) -> None:
        self.prefill = prefill
        self.decode = decode


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, exact_flags: tuple[str, ...]) -> Iterator[Pair]:
    """P + D with `--local-prefill never`: what D serves has crossed the wire."""
    with starting(tmp_path_factory.mktemp("pair")) as starter:
        log = {"JAX_LOG_COMPILES": "1"}
        common = (*exact_flags, "--no-enable-prefix-caching", *PATIENT)
        prefill = starter("prefill", "--role", "prefill", *common, env=log).wait_ready()
        flags = ("--prefill", prefill.grpc, "--local-prefill", "never")
        decode = starter("decode", "--role", "decode", *flags, *common, env=log).wait_ready()
        yield Pair(prefill, decode)
