"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "it takes too long", limit_s: float = 60.0) -> None:
    """Look again and again; AssertionError, with `what`, when it does not come true."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)
