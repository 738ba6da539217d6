"""The thread that owns one engine, and what others may ask of it: post, call, health.

The loop's exceptions are not survivable (a step raised, an invariant failed): state is logged, every client gets an error, and
`on_crash` is told, which in a server ends the process so that its supervisor starts a fresh one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, NoReturn

from jdisagg.core.errors import Unavailable
from jdisagg.roles.engine_loop import EngineLoop

log = logging.getLogger(__name__)

STALLED_AFTER_S = 5.0  # /health is false when no tick has ended for this long
ANSWER_S = 5.0  # that `call` waits for


class EngineBroken(BaseException):
    """It was asked for; as no Exception it is no answer to a call."""


class EngineThread:
    """Runs `loop.tick` until `stop`."""

    def __init__(self, loop: EngineLoop, *, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self.ticks = 0  # finished ticks; the watchdog looks at them, and heartbeats carry them
        self._tick_ended_s = monotonic()
        self._tick_began_s: float | None = None
        self._on_crash = on_crash
        self._crash: BaseException | None = None
        self._stopping = threading.Event()
        self.is_frozen = False  # test hook: there are no ticks, and the process goes on, as with a hung device
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start ticking."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current tick; returns False when it did not stop in time."""
        self._stopping.set()
        self.loop.inbox.call(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two ticks and return its result. Raises TimeoutError when the engine does not turn over."""
        return self.loop.inbox.call(function).result(timeout=ANSWER_S)

    def unhealthy_reason(self, now_s: float) -> str:
        """Empty when the engine turns over."""
        if self._crash is not None:
            return f"engine stopped: {type(self._crash).__name__}: {self._crash}"
        if not self._thread.is_alive():
            return "engine thread is not running"
        silent_s = now_s - self._tick_ended_s
        return f"no tick has ended for {silent_s:.1f} s" if silent_s > STALLED_AFTER_S else ""

    @property
    def is_over(self) -> bool:
        """It has raised: nothing that it has or is given goes on here."""
        return self._crash is not None

    def step_running_s(self, now_s: float) -> float:
        """Seconds the current tick has been running; 0 between ticks."""
        began_s = self._tick_began_s
        return 0.0 if began_s is None else now_s - began_s

    def freeze_or_thaw(self) -> None:
        """See `is_frozen`."""
        self.is_frozen = not self.is_frozen

    def break_down(self, why: str = "a test hook asked for it") -> None:
        """The engine raises, as when a step fails."""
        self.loop.inbox.call(partial(_break_down, why))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self.is_frozen:
                    self._stopping.wait(0.05)
                    continue
                self._tick_began_s = monotonic()
                self.loop.tick(self._tick_began_s)
                self._tick_ended_s = monotonic()
                self._tick_began_s = None
                self.ticks += 1
        except BaseException as error:
            self._crash = error
            log.critical("engine stopped by %s; state: %s", type(error).__name__, self._state_text(), exc_info=error)
            self.loop.fail_all(Unavailable("the engine stopped; send the request again"))
            self._on_crash(error)

    def _state_text(self) -> str:
        try:
            return json.dumps(self.loop.snapshot(), default=str)
        except Exception as error:  # noqa: BLE001 - a broken invariant may break the snapshot too; the crash itself is logged
            return f"no snapshot: {error!r}"


def _break_down(why: str) -> NoReturn:
    raise EngineBroken(why)
