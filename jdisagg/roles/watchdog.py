"""Ends the process when one step takes longer than `--step-timeout-s`: a hung device never comes back by itself."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic

from jdisagg.roles.engine_thread import EngineThread

log = logging.getLogger(__name__)

EXIT_STEP_TIMEOUT = 70


class Watchdog:
    """Looks at the engines from a thread of its own; `on_timeout` is `os._exit` in a server."""

    def __init__(
        self, engines: list[EngineThread], step_timeout_s: float, on_timeout: Callable[[int], None] = os._exit
    ) -> None:
        self._engines = engines
        self._step_timeout_s = step_timeout_s
        self._on_timeout = on_timeout
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching; call after warm-up."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.wait(min(0.25, self._step_timeout_s / 4)):
            for engine in self._engines:
                running_s = engine.step_running_s(monotonic())
                if running_s > self._step_timeout_s:
                    log.critical(
                        "a step has been running for %.1f s (--step-timeout-s %.1f): exiting", running_s, self._step_timeout_s
                    )
                    log.critical("plan on the device: %s", engine.loop.in_flight_text())
                    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                    self._on_timeout(EXIT_STEP_TIMEOUT)
                    return
