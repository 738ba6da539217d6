"""Tests run in several processes with one compilation cache, whose entries jax writes where the others read them."""

from __future__ import annotations

import os
from pathlib import Path
from random import random

import jax
import pytest


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_an_entry_that_another_process_has_only_begun_to_write_fails_no_test(num_bytes: int) -> None:
    directory, factor = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), random()  # there is no entry of it yet

    def compiled() -> float:
        def begun(x: float) -> float:
            return x * factor

        return float(jax.jit(begun)(2.0))

    before = set(directory.glob("jit_begun-*-cache"))
    first = compiled()
    (entry,) = set(directory.glob("jit_begun-*-cache")) - before
    whole = entry.read_bytes()
    entry.write_bytes(whole[:num_bytes])
    try:
        assert compiled() == first
    finally:
        entry.write_bytes(whole)
