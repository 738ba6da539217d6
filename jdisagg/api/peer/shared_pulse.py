"""One pulse for all streams to one peer process: it lives, is quiet and dies for all of them.

A heartbeat goes over any one of them, and whatever comes over one of them is a sign of life for all. So a peer costs four
heartbeats a second, and not each of the thousands of requests that may wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jdisagg.api.pulse import Pulse
from jdisagg.core.config import TransferConfig


def _nobody_cares(*_: bool) -> None:
    """This end of the stream needs no word of it."""


@dataclass(eq=False, slots=True)
class Listener:
    """One stream. Made on the event loop."""

    beat: Callable[[], bool]  # say a heartbeat; False = this stream has something to say anyway
    on_quiet: Callable[[bool], None] = _nobody_cares  # see Pulse
    on_alive: Callable[[], None] = _nobody_cares  # something came since the last beat, over any stream
    silent: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())  # it is dead


class SharedPulse:
    """Runs while it has listeners; on one event loop."""

    def __init__(self, config: TransferConfig, name: str = "") -> None:
        """`name`: by which the peer knows what belongs together; "" = one stream alone."""
        self.name = name
        self._config = config
        self._listeners: dict[Listener, None] = {}  # the next one to beat first
        self._pulse: Pulse | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_heard = False

    def heard(self) -> None:
        """Something came from the peer."""
        self._was_heard = True
        if self._pulse is not None:
            self._pulse.heard()

    @contextmanager
    def hear(self, listener: Listener) -> Iterator[None]:
        """The stream beats and listens inside; its `silent` is done once nothing came for `dead_after_s`. One that comes while
        the peer is quiet is told so."""
        self._listeners[listener] = None
        try:
            if self._pulse is None:
                self._start()
            elif self._pulse.is_quiet:
                listener.on_quiet(True)
            yield
        finally:
            del self._listeners[listener]
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._pulse = self._task = None

    def _start(self) -> None:
        config = self._config
        self._pulse = Pulse(heartbeat_s=config.heartbeat_s, dead_after_s=config.dead_after_s, on_quiet=self._tell)
        self._task = asyncio.create_task(self._run(self._pulse))

    async def _run(self, pulse: Pulse) -> None:
        try:
            await pulse.run(self._beat)
        finally:
            if self._pulse is pulse:  # it is dead; or a bug of a listener, after which nobody would notice
                self._pulse = self._task = None  # who comes now asks anew
                for listener in self._listeners:
                    if not listener.silent.done():
                        listener.silent.set_result(None)

    def _beat(self) -> None:
        listeners = list(self._listeners)
        if self._was_heard:
            self._was_heard = False
            for listener in listeners:
                listener.on_alive()
        for listener in listeners:
            self._listeners[listener] = self._listeners.pop(listener)  # the others' turn comes first
            if listener.beat():
                break

    def _tell(self, is_quiet: bool) -> None:
        for listener in list(self._listeners):
            listener.on_quiet(is_quiet)
