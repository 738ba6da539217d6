"""Ends the process when one step takes longer than `--step-timeout-s`: a hung device never comes back by itself."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from jdisagg.roles.engine_thread import EngineThread

log = logging.getLogger(__name__)

EXIT_STEP_TIMEOUT = 70
MOST_COUNTED = 2  # intervals that one look counts for, however late it comes
STACKS_S = 5  # to write them; then the kernel ends the process
STOOD_STILL_S = 5.0  # between two looks: said in the log, also where others are more patient


class Watchdog:
    """Looks at the engines from a thread of its own; `on_timeout` is `os._exit` in a server."""

    def __init__(
        self,
        engines: list[EngineThread],
        step_timeout_s: float,
        on_timeout: Callable[[int], None] = os._exit,
        *,
        dead_after_s: float = STOOD_STILL_S,
    ) -> None:
        """`dead_after_s`: when other processes take this one for dead, and then say so, as if it were the network or theirs."""
        self._engines = engines
        self._step_timeout_s = step_timeout_s
        self._on_timeout = on_timeout
        self._still_s = min(STOOD_STILL_S, dead_after_s)
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
        interval_s = min(0.25, self._step_timeout_s / 4)
        watched, looked_s = [_Watched(engine) for engine in self._engines], monotonic()
        while not self._stop.wait(interval_s):
            passed_s, looked_s = monotonic() - looked_s, monotonic()
            if passed_s > self._still_s:
                text = (
                    "this process stood still for %.1f s (stopped, or its machine was): counts for no step; its streams may end"
                )
                log.warning(text, passed_s)
            for one in watched:
                running_s = one.running_s(min(passed_s, MOST_COUNTED * interval_s))
                if running_s > self._step_timeout_s:
                    signal.alarm(STACKS_S)  # who hangs may hold the log; and dumping to nobody holds the interpreter for ever
                    log.critical(
                        "a step has been running for %.1f s (--step-timeout-s %.1f): exiting", running_s, self._step_timeout_s
                    )
                    log.critical("plan on the device: %s", one.engine.loop.in_flight_text())
                    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                    signal.alarm(0)
                    self._on_timeout(EXIT_STEP_TIMEOUT)
                    return


@dataclass(slots=True)
class _Watched:
    """An engine, and for how long this thread has seen its tick run: a clock that goes on while the process is stopped would
    blame the tick for it."""

    engine: EngineThread
    tick: int = -1
    seen_s: float = 0.0

    def running_s(self, passed_s: float) -> float:
        """After another `passed_s`; never more than the clock says."""
        by_clock_s = self.engine.step_running_s(monotonic())
        if self.engine.ticks != self.tick:
            self.tick, self.seen_s = self.engine.ticks, 0.0
        self.seen_s += passed_s
        return min(self.seen_s, by_clock_s)
