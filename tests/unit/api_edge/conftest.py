"""One tiny tokenizer for all, and what is left of a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import httpx
import psutil
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import train_byte_level


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with BOS and a chat template."""
    return Tokenizer.from_directory(train_byte_level(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of httpx wait for longer than five seconds, for which a busy machine may let a server stand."""
    for wait in ("connect", "read", "write", "pool"):
        monkeypatch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, wait, 60.0)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process, no descriptor; threads and tasks are counted by `run_quiet`."""
    me = psutil.Process()
    gc.collect()  # what earlier tests left is not to go while this one runs
    children, num_descriptors = {child.pid for child in me.children(recursive=True)}, me.num_fds()
    yield
    assert {child.pid for child in me.children(recursive=True)} == children
    assert me.num_fds() <= num_descriptors, "fewer may be there: gRPC closes those of earlier tests when it comes to it"
