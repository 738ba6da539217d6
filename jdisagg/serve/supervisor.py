"""Keeps a set of children running: start, wait for READY, restart with back-off, end in stages.

start -> READY -> exited -> (0.5 s, 1 s, .. 10 s) -> start -> ..     the delay falls back once a run served for 30 s
start -> exit 2                                                      a bad configuration: StartFailed, nothing is retried
start -> exit or silence, three times, never READY                   StartFailed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.api.tasks import until_set
from jdisagg.core.logs import to_stderr
from jdisagg.serve.child import Child, ChildSpec
from jdisagg.serve.ready import Ready

log = logging.getLogger(__name__)

EXIT_BAD_CONFIG = 2


class StartFailed(Exception):
    """A child cannot be brought up. `status` is what the supervisor should exit with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the supervisor waits for what."""

    silence_s: float = 3600.0  # of one that is not READY: weights may come from afar, and what compiles says so now and then
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    stable_s: float = 30.0  # READY this long = the next crash starts from the first delay
    grace_s: float = 35.0  # from SIGTERM to SIGKILL, once READY
    starting_grace_s: float = 1.0  # before READY there is nothing to drain
    max_start_failures: int = 3


class _Run(NamedTuple):
    """How one start of a child went."""

    ready: Ready | None
    status: int | None  # None: there was no process
    ending: str
    served_s: float = 0.0  # from READY to its end


class Supervisor:
    """Owns its children. `start` begins keeping one, `stop` ends all; both from one event loop."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._outlet = to_stderr()  # of all: each would wait for a slow reader, and write behind a line of another that was cut
        self._children: dict[str, tuple[ChildSpec, Child]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.restarts = 0
        self.is_broken = asyncio.Event()  # a bug: some child is no longer kept running

    async def start(self, specs: Sequence[ChildSpec]) -> list[Ready]:
        """Start and keep them; returns when all are READY. Raises StartFailed; `stop` must still be called."""
        loop = asyncio.get_running_loop()
        first: list[asyncio.Future[Ready]] = [loop.create_future() for _ in specs]
        for spec, done in zip(specs, first, strict=True):
            keeper = asyncio.create_task(self._keep(spec, done))
            keeper.add_done_callback(lambda task, done=done: self._pass_on(task, done))
            self._keepers.append(keeper)
        return list(await asyncio.gather(*first))

    @property
    def pids(self) -> dict[str, int]:
        """Running children by name."""
        return {name: child.pid for name, (_, child) in self._children.items()}

    async def stop(self) -> bool:
        """End every child, stage by stage; whether all that were READY exited with 0."""
        self._stopping.set()
        clean = True
        for stage in sorted({spec.stage for spec, _ in self._children.values()}):
            ending = [child for spec, child in self._children.values() if spec.stage == stage]
            served = [child.is_ready for child in ending]
            statuses = await asyncio.gather(*(self._end(child) for child in ending))
            clean = clean and not any(status for status, ready in zip(statuses, served, strict=True) if ready)
        if self._keepers:
            await asyncio.wait(self._keepers)  # each has its child ended by now, or ends the one it was just starting
        return clean

    async def _keep(self, spec: ChildSpec, first: asyncio.Future[Ready]) -> None:
        delay_s, failures, previous = self._patience.first_delay_s, 0, None
        while not self._stopping.is_set():
            run = await self._run(spec, previous, first)
            if self._stopping.is_set():
                return
            previous = run.ready or previous
            failures += 1
            if not first.done() and (run.status == EXIT_BAD_CONFIG or failures == self._patience.max_start_failures):
                first.set_exception(_start_failed(spec.name, run, failures))
                return
            if run.served_s >= self._patience.stable_s:
                delay_s = self._patience.first_delay_s
            if run.status == 0 and run.ready is not None:  # after a SIGTERM it drains and exits so
                log.info("%s: ended as it was told to; starting it again in %.1f s", spec.name, delay_s)
            else:
                log.warning("%s: %s; starting it again in %.1f s", spec.name, run.ending, delay_s)
            await until_set(self._stopping, delay_s)
            delay_s = min(2 * delay_s, self._patience.max_delay_s)
            self.restarts += 1

    async def _run(self, spec: ChildSpec, previous: Ready | None, first: asyncio.Future[Ready]) -> _Run:
        """From the child's start to its end. There may be no process to be had: memory, processes or descriptors are short."""
        try:
            child = await Child.start(spec, previous, self._outlet)
        except OSError as error:
            return _Run(None, None, f"could not be started: {error}")
        if self._stopping.is_set():
            return _Run(None, await self._end(child), "")
        self._children[spec.name] = (spec, child)
        ready = ending = None
        try:
            ready = await child.wait_ready(self._patience.silence_s)
        except TimeoutError:
            ending = f"said nothing for {self._patience.silence_s:.0f} s, and was ended"
            log.error("%s: not ready, and said nothing for %.0f s; ending it", spec.name, self._patience.silence_s)
        if ready is None and not self._stopping.is_set():
            await self._end(child)
        elif ready is not None and not first.done():
            first.set_result(ready)
        elif ready is not None:  # whoever scrapes it has to know where it is now
            log.info("%s: ready again as pid %d, HTTP on %s, gRPC on %s", spec.name, ready.pid, ready.http, ready.grpc)
        ready_s = time.monotonic()
        status = await child.wait()
        served_s = 0.0 if ready is None else time.monotonic() - ready_s
        if not self._stopping.is_set():
            del self._children[spec.name]
        ending = ending or (f"exited with {status}" if status >= 0 else f"was ended by signal {-status}")
        return _Run(ready, status, ending, served_s)

    def _pass_on(self, keeper: asyncio.Task[None], first: asyncio.Future[Ready]) -> None:
        """A keeper that broke must not leave `start` waiting, nor a fleet without one of its processes."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and not first.done():
            first.set_exception(error)
        elif error is not None:
            log.critical("a supervising task broke", exc_info=error)
            self.is_broken.set()

    async def _end(self, child: Child) -> int:
        return await child.stop(self._patience.grace_s if child.is_ready else self._patience.starting_grace_s)


def _start_failed(name: str, run: _Run, failures: int) -> StartFailed:
    if run.status == EXIT_BAD_CONFIG:
        return StartFailed(f"{name} refuses its configuration; its line above says what to change", EXIT_BAD_CONFIG)
    return StartFailed(f"{name} {run.ending} before it was ready, {failures} times; its log is above", 1)
