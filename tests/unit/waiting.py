"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "it takes too long", limit_s: float = 60.0) -> None:
    """Look again and again, and once more when the time is over: this process may have stood still. AssertionError, with
    `what`, when it does not come true."""
    end_s, is_over = time.monotonic() + limit_s, False
    while not condition():
        assert not is_over, what
        time.sleep(0.005)
        is_over = time.monotonic() > end_s
