"""The life of a serving process: one asyncio loop, SIGTERM drains, SIGUSR1 shows what it is doing.

    async def serve(config, process):      # of each role's module
        ...                                # build the parts
        process.dump_with(parts.state)     # what SIGUSR1 shows besides stacks; before, for how long it has been starting
        ...                                # print READY
        await process.drained(..)          # at SIGTERM or SIGINT, within config.server.drain_s
        ...                                # close the parts
        return 0

The first SIGTERM or SIGINT sets `stopping`; a later one ends the process at once, drained or not, but for the child of a
supervisor, which kills it. Before `run_process`, while modules are imported, `end_when_told` answers.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

import uvloop

from jdisagg.api.tasks import start_in, threads_beside
from jdisagg.core.logs import make_formatter
from jdisagg.core.outlet import Outlet, reopened_pipe
from jdisagg.serve.cores import usable_cores
from jdisagg.serve.environment import PARENT_VARIABLE

log = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_FORCED = 1
ONE_TELLING_S = 0.2  # wrappers such as timeout(1) signal the process, and then its group with it
GC_THRESHOLDS = (10_000, 10, 20)  # two million new objects before all are searched: as many as thousands of requests have
MOST_THREADS, MORE_THREADS = 32, 4  # beside the event loop: more than cores, so many at most, as asyncio has them by itself


class Process:
    """Signals of this process, seen from its event loop. Made by `run_process`."""

    def __init__(self, *, is_supervised: bool = False) -> None:
        """`is_supervised`: systemd signals all processes of a unit, and then the supervisor its children, when their turn has
        come."""
        self.stopping = asyncio.Event()
        self.status = 0  # with which it exits where nothing else is the matter
        self._is_supervised = is_supervised
        self._began_s = monotonic()
        self._told_s: float | None = None  # when SIGTERM or SIGINT first came
        self._state: Callable[[], Awaitable[Mapping[str, Any]]] = self._starting
        self._dumps: set[asyncio.Task[None]] = set()

    def dump_with(self, state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """`state` is awaited at SIGUSR1; it returns JSON-able data within a few seconds, whatever hangs."""
        self._state = state

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install the signal handlers. SIGUSR1 writes stacks even when the loop is stuck."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        faulthandler.unregister(signal.SIGUSR1)  # it would go on chaining to what `end_when_told` left there
        loop.add_signal_handler(signal.SIGUSR1, self._dump)
        stacks = _where_stacks_go()
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)

    def leave(self, status: int) -> None:
        """All is done: SIGTERM and SIGINT end what is left of the process, which may take a while, with the same status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(status))

    def end_with(self, status: int) -> None:
        """As a first SIGTERM, for a fault of its own: it exits with `status` when it has drained."""
        self.status = status
        self.stopping.set()

    async def drained(self, drain: Callable[[float], Awaitable[int]], drain_s: float) -> float:
        """Wait until it is told to end, and let `drain` wait for what runs, until a deadline that is returned; that tells how
        many requests still run then."""
        await self.stopping.wait()
        deadline_s = monotonic() + drain_s
        if unfinished := await drain(deadline_s):
            log.warning("requests still running at the end of --drain-s: %d", unfinished)
        else:
            log.info("drained: every request has ended")
        return deadline_s

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a part of the start that has a thread of its own. SIGTERM meanwhile ends the process at once: that thread
        cannot be stopped."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.info("ended before it was ready; no request was lost")
            os._exit(0)
        stopped.cancel()
        return task.result()

    def _stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._told_s is not None:
            if self._is_supervised or monotonic() - self._told_s < ONE_TELLING_S:
                return
            log.error("%s again: ending without waiting for the rest", name)
            os._exit(EXIT_FORCED)
        log.info("%s: draining", name)
        self._told_s = monotonic()
        self.stopping.set()

    def _dump(self) -> None:
        start_in(self._dumps, self._write_state())

    async def _starting(self) -> Mapping[str, Any]:
        return {"stage": "starting", "seconds": round(monotonic() - self._began_s, 3)}

    async def _write_state(self) -> None:
        state = await self._state()
        told = {"event": "state", "pid": os.getpid(), "frozen_objects": gc.get_freeze_count(), **state}
        Outlet(sys.stderr).write(json.dumps(told, default=str) + "\n")


def end_when_told() -> None:
    """Until `run_process` listens, SIGTERM and SIGINT end this process at once, with 0: there is nothing to drain. Process 1 of
    a container would never hear of them otherwise: the kernel keeps signals from it for which it has no handler. SIGUSR1 shows
    where it is: a volume that does not answer may hold it up here, too."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    atexit.register(_turn_deaf)  # before others are, which makes it the last
    signal.signal(signal.SIGUSR1, lambda *_: None)
    # without chain the read that hangs would be restarted, and a SIGTERM that came while stacks were written not be heard
    faulthandler.register(signal.SIGUSR1, _where_stacks_go(), all_threads=True, chain=True)


def _turn_deaf() -> None:
    """Python is about to forget its handlers: told once more, as by systemd and a supervisor, a process that has drained would
    end by that signal, a moment before it ends by itself, and not with its status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _where_stacks_go() -> int:
    """A descriptor of stderr, for good. A pipe takes of stacks what it has room for: while nobody reads it, a handler that
    waits would keep the event loop, and a process that crashed from its end."""
    number = sys.stderr.fileno()
    own = reopened_pipe(number)
    return number if own is None else own


def _end(number: int, frame: FrameType | None) -> None:
    text = "ended while it was starting; no request was lost"
    # a line of the log, and yet not logged: another thread may hold the handler's lock, and be kept by a reader
    record = logging.LogRecord(log.name, logging.INFO, __file__, 0, text, None, None)
    formatters = [handler.formatter for handler in logging.getLogger().handlers if handler.formatter is not None]
    line = (formatters[0] if formatters else make_formatter("serve")).format(record)
    with suppress(OSError):  # whoever was to read it may have gone
        Outlet(sys.stderr).write(f"{line}\n")
    os._exit(0)


def search_seldom() -> None:
    """A process that starts makes what it keeps, and little garbage. By itself Python searches all of it again whenever a
    quarter was added: 0.9 s of the 6.6 s of CPU time that a worker takes whose programs are cached."""
    gc.set_threshold(*GC_THRESHOLDS)


def keep_what_is_there() -> None:
    """What a process has made until READY it keeps, and no search for garbage walks it from here on. With jax and the model's
    programs those are 400,000 objects, and a quarter of a second in which no thread of the process moves. Requests leave next
    to no garbage to search for."""
    gc.collect()
    gc.freeze()
    search_seldom()


def run_process(serve: Callable[[Process], Awaitable[int]]) -> int:
    """Run `serve` to its end on a fresh event loop, signals installed; returns its exit status."""

    async def main() -> int:
        loop, process = asyncio.get_running_loop(), Process(is_supervised=PARENT_VARIABLE in os.environ)
        with threads_beside(min(MOST_THREADS, usable_cores() + MORE_THREADS), "beside") as beside:
            loop.set_default_executor(beside)
            process.listen(loop)
            status = await serve(process) or process.status
            process.leave(status)
        loop.set_default_executor(None)  # pyright: ignore[reportArgumentType]  # else it takes another thread to end them
        return status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
