"""Entries of the compilation cache that a full disk or a kill cut short."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jdisagg.core.config import Config, DeviceConfig
from jdisagg.serve.compile_cache import BLOCK_BYTES, drop_broken_entries
from jdisagg.serve.environment import prepare_jax

COMPILING = "import jax; jax.jit(lambda x: x * 3 + 1)(2.0)"
LIMIT_S = 170
NOISE = random.Random(7).randbytes(4 * BLOCK_BYTES)


def whole(num_blocks: int) -> bytes:
    """An entry of exactly so many blocks."""
    for size in range(num_blocks * BLOCK_BYTES, 0, -1):
        if len(entry := zlib.compress(NOISE[:size], level=0)) == num_blocks * BLOCK_BYTES:
            return entry
    raise AssertionError("no entry has that size")


@pytest.mark.parametrize("rest", [b"", zlib.compress(NOISE)[:BLOCK_BYTES], zlib.compress(NOISE)[: 2 * BLOCK_BYTES]])
def test_an_entry_that_was_cut_short_goes(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "jit_step-1a2b-cache").write_bytes(rest)
    prepare_jax(Config(role="unified", device=DeviceConfig(compilation_cache_dir=str(tmp_path))), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", [zlib.compress(b"code"), whole(1), whole(3), b"\x28\xb5\x2f\xfd".ljust(BLOCK_BYTES)])
def test_an_entry_that_is_whole_or_of_another_form_stays(tmp_path: Path, entry: bytes) -> None:
    (tmp_path / "jit_step-1a2b-cache").write_bytes(entry)
    drop_broken_entries(tmp_path)
    assert (tmp_path / "jit_step-1a2b-cache").read_bytes() == entry


def test_files_that_are_no_entries_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"")
    (tmp_path / "a-cache").mkdir()  # cannot be read
    drop_broken_entries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "a-cache"}


def test_without_a_cache_nothing_here_is_taken_for_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-cache").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    prepare_jax(Config(role="unified"), {"JAX_COMPILATION_CACHE_DIR": ""})
    assert (tmp_path / "my-cache").exists()


def test_what_another_process_removed_meanwhile_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jit_step-1a2b-cache").write_bytes(b"")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: [read(path), path.unlink()][0])
    drop_broken_entries(tmp_path)
    assert not caplog.records


def test_jax_keeps_what_it_compiles_anew(tmp_path: Path) -> None:
    """Rests on the form of its entries: where that changes, this fails."""

    def compile_it() -> None:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", COMPILING], env=environment, timeout=LIMIT_S, check=True)

    compile_it()
    entries = list(tmp_path.glob("*-cache"))
    assert entries
    for path in entries:
        path.write_bytes(b"")
    drop_broken_entries(tmp_path)
    compile_it()
    assert all(path.stat().st_size for path in entries)
