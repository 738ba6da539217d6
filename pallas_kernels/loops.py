"""Loops inside kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

_LONGEST = 8  # loops up to this length are written out: longer ones take the compiler seconds


def loop(length: int, act: Callable[[Any], None], *, written_out: bool = True) -> None:
    """`act` on 0..length-1; written out, when that is not too much, so that rounds can overlap."""
    if written_out and length <= _LONGEST:
        for index in range(length):
            act(index)
    else:
        lax.fori_loop(0, length, lambda index, _: act(index), None)


def arrive(wait: Callable[[], None], use: Callable[[], None]) -> None:
    """Wait for what was copied, then use it. Tests replace it to plant a wait that is missing or late."""
    wait()
    use()
