"""One child process of a supervisor: started with a pipe it dies with, its output forwarded, its READY line awaited.

stdout of the child is watched for READY; everything else it prints goes to our stderr, each line with the child's name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from jdisagg.api.tasks import first_of
from jdisagg.core.logs import passed_on
from jdisagg.core.outlet import Outlet
from jdisagg.serve.environment import PARENT_VARIABLE, check_descriptors
from jdisagg.serve.ready import Ready, parse

log = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 2**20  # longer lines of a child are cut into pieces
_READ_BYTES = 2**16  # what a pipe holds
_DESCRIPTORS = 12  # a start takes eight for a moment


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """What to run. `command` gets the READY of the former run (None at first), so that a restart can keep its ports."""

    name: str  # prefix of its log lines, "prefill-0"
    command: Callable[[Ready | None], Sequence[str]]
    environ: Mapping[str, str] = field(default_factory=dict)  # on top of ours
    stage: int = 0  # at shutdown, lower stages end first


class Child:
    """A running child. Made by `start`; ended by `stop`, which is idempotent."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, outlet: Outlet) -> None:
        self.name = name
        self._process = process
        self._outlet = outlet
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._spoke_s = monotonic()  # when it wrote something last, or began
        self._pumps = [
            asyncio.create_task(self._pump(stream)) for stream in (process.stdout, process.stderr) if stream is not None
        ]

    @classmethod
    async def start(cls, spec: ChildSpec, previous: Ready | None, outlet: Outlet) -> Child:
        """Start the process; see `environment.die_with_parent` for how it lives with us. What it says goes to `outlet`. Raises
        OSError when there is none to be had."""
        check_descriptors(_DESCRIPTORS)  # uvloop keeps for good what it has when one is missing, and says not why
        process = await asyncio.create_subprocess_exec(
            *spec.command(previous),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **spec.environ, PARENT_VARIABLE: str(os.getpid())},
            limit=_READ_BYTES,
        )
        log.info("%s: started as pid %d", spec.name, process.pid)
        return cls(spec.name, process, outlet)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said READY."""
        return self._ready.done()

    async def wait_ready(self, silence_s: float) -> Ready | None:
        """Its READY; None when it exits first. Raises TimeoutError when it writes nothing at all for `silence_s`."""
        exited = asyncio.create_task(self._process.wait())
        try:
            while True:
                await first_of(self._ready, exited, timeout_s=max(0.0, self._spoke_s + silence_s - monotonic()))
                if self._ready.done() or exited.done():
                    return self._ready.result() if self._ready.done() else None
                if monotonic() - self._spoke_s >= silence_s:
                    raise TimeoutError
        finally:
            exited.cancel()

    async def wait(self) -> int:
        """Its exit status, once it has ended and all its output is forwarded; negative = ended by that signal."""
        status = await self._process.wait()
        await asyncio.wait(self._pumps, timeout=1.0)
        return status

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL when it has not ended after `grace_s`; returns its exit status."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            log.error("%s: did not end within %.1f s of SIGTERM; killing it", self.name, grace_s)
            self._signal(signal.SIGKILL)
        finally:
            status = await self.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            for pump in self._pumps:
                pump.cancel()
        return status

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _pump(self, stream: asyncio.StreamReader) -> None:
        begun = bytearray()  # of a line: a bar of progress is one for as long as it takes, and says something all the while
        while data := await stream.read(_READ_BYTES):
            self._spoke_s = monotonic()
            begun += data
            *lines, rest = begun.split(b"\n") if b"\n" in data else (begun,)
            if len(rest) >= _LINE_LIMIT_BYTES:
                lines, rest = [*lines, rest], bytearray()
            for line in lines:
                self._pass_on(stream, line)
            begun = rest
        if begun:
            self._pass_on(stream, begun)

    def _pass_on(self, stream: asyncio.StreamReader, line: bytes | bytearray) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        ready = parse(text) if stream is self._process.stdout else None
        if ready is not None and not self._ready.done():
            self._ready.set_result(ready)
        else:
            self._say(passed_on(self.name, text) + "\n")

    def _say(self, text: str) -> None:
        """Nobody may be there to read it any more; the child is read all the same: it would stop at a full pipe."""
        with suppress(OSError, ValueError):
            self._outlet.write(text)
