"""Counts backend compilations, from JAX's own monitoring events, so that `compiles_after_ready_total` is honest."""

from __future__ import annotations

import threading
from typing import Any

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # once per executable built or fetched from the persistent cache


class CompileCounter:
    """Counts from construction on. JAX offers no way to take a listener back: make one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # compilations may happen on any thread
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @property
    def count(self) -> int:
        """Executables since construction, from every thread."""
        with self._lock:
            return self._count

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == _EVENT:
            with self._lock:
                self._count += 1
