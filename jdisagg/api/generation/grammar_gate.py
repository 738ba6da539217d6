"""Grammars of clients are compiled in a process of their own first: one that no compiler survives ends that process alone.

    known -> what was found then
    else  -> the checker compiles it; what is good, engines compile for themselves

One check at a time; requests with the same grammar share it, and who waits no longer ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from time import monotonic

from jdisagg.core.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from jdisagg.core.latest import remember
from jdisagg.core.logs import Seldom
from jdisagg.core.metrics import COMPILED, ENDLESS, REFUSED, Metrics
from jdisagg.core.requests import Grammar
from jdisagg.text.grammar import Vocabulary
from jdisagg.text.grammar_checker import MOST_S

MOST_WAITING = 64  # grammars that nobody has seen: milliseconds each, where none takes MOST_S
MOST_KNOWN = 256  # the latest
_WAIT_S = 15.0  # of a clock, for what has MOST_S of a processor: beyond, the machine is at fault, not the grammar
_START_S = 30.0  # a Python interpreter, and a large tokenizer to read
_TOLD_EVERY_S = 10.0
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # a kernel out of memory, or whoever ends all processes of a service
_COMMAND = (sys.executable, "-m", "jdisagg.text.grammar_checker")
_NOBODY = "grammars cannot be checked, which a process of its own does"
_ENDLESS = "grammar: to compile it takes too long or too much memory; make it simpler"

log = logging.getLogger(__name__)


class GrammarGate:
    """Lets grammars through to engines. Use from one event loop; the checker starts with the first grammar."""

    def __init__(self, vocabulary: Vocabulary, metrics: Metrics) -> None:
        self._outcomes = metrics.requests.grammars
        self._known: dict[Grammar, str] = {}  # what is wrong with each; "" = nothing
        self._checks: dict[Grammar, asyncio.Task[str | RequestError]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._checker = _Checker(vocabulary)
        self._told, self._told_unchecked = Seldom(_TOLD_EVERY_S), Seldom(_TOLD_EVERY_S)

    async def prepare(self, grammar: Grammar) -> None:
        """When this returns, an engine can compile it. Raises InvalidRequest, Overloaded while too many others are looked at,
        and Unavailable where none can be looked at."""
        error: str | RequestError | None = self._known.get(grammar)
        if error is None:
            error = await asyncio.shield(self._check(grammar))
        else:
            remember(self._known, grammar, error, MOST_KNOWN)
        if isinstance(error, RequestError):
            raise error
        if error:
            raise InvalidRequest(error, field="grammar")

    async def aclose(self) -> None:
        """End the checker."""
        self._checker.close()
        tasks = list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(self._checker.kill)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, grammar: Grammar) -> asyncio.Task[str | RequestError]:
        if (task := self._checks.get(grammar)) is None:
            if len(self._checks) >= MOST_WAITING:
                raise Overloaded(f"{MOST_WAITING} new grammars are being checked; send the request again", retry_after_s=MOST_S)
            task = self._checks[grammar] = asyncio.create_task(self._answer(grammar))
            task.add_done_callback(lambda _: self._checks.pop(grammar, None))
        return task

    async def _answer(self, grammar: Grammar) -> str | RequestError:
        """What is wrong with it; "" = nothing. What is no fault of the grammar is returned, too: who waited may have gone, and
        asyncio logs what nobody was told."""
        try:
            async with self._one_at_a_time:
                error = await self._ask(grammar)
        except Unavailable as failure:
            if not self._checker.is_closed:
                text = "requests with a grammar that is new here fail: %s"
                self._told_unchecked.say(log, logging.WARNING, text, failure.message, now_s=monotonic())
            return failure.with_traceback(None)
        self._outcomes.labels(outcome=COMPILED if not error else ENDLESS if error is _ENDLESS else REFUSED).inc()
        remember(self._known, grammar, error, MOST_KNOWN)
        return error

    async def _ask(self, grammar: Grammar) -> str:
        try:
            return await self._ask_in_time(grammar)
        except RuntimeError as error:  # no thread is left
            raise Unavailable(f"{_NOBODY}: {error}") from error

    async def _ask_in_time(self, grammar: Grammar) -> str:
        limit_s = _WAIT_S + (0.0 if self._checker.is_there else _START_S)
        asked = asyncio.create_task(asyncio.to_thread(self._checker.ask, grammar))
        in_time: set[asyncio.Task[str | None]] = set()
        try:
            in_time, _ = await asyncio.wait({asked}, timeout=limit_s)
        finally:
            while not asked.done():
                await asyncio.to_thread(self._checker.kill)  # which ends the waiting, or has another one started
                await asyncio.wait({asked}, timeout=_WAIT_S + _START_S)
            await asyncio.gather(asked, return_exceptions=True)  # its error may be nobody's
        if (error := await asked) is not None:
            return error
        if not in_time:
            raise Unavailable(f"{_NOBODY}: it had no time to within {limit_s:g} s")
        text, what = "a grammar (%s, %d characters) ended the process that checks them", (grammar.kind.value, len(grammar.text))
        self._told.say(log, logging.WARNING, text, *what, now_s=monotonic())
        return _ENDLESS


class _Checker:
    """The other process, from here. `ask` blocks, for one thread at a time; the others may come from any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of those below
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def is_closed(self) -> bool:
        """Whether none is started any more."""
        return self._closed

    def ask(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar, "" = nothing; None: the process has not survived it. What is no fault of the
        grammar raises Unavailable: there is no process, or something else ended it."""
        question: dict[str, object] = {"kind": grammar.kind.value, "text": grammar.text}
        if not (self.is_there and self._say(question) and self._read()):  # the last one may have ended after its answer
            self.kill()
            self._start()
            if not (self._say(asdict(self._vocabulary)) and self._say(question) and self._read()):
                self.kill()
                raise Unavailable(f"{_NOBODY}: it ended as it started")
        if answer := self._read():
            return json.loads(answer)["error"]
        process = self._process  # None: it was killed from here
        is_from_outside = process is not None and process.wait() in _FROM_OUTSIDE
        self.kill()
        if is_from_outside:
            raise Unavailable(f"{_NOBODY}: something else ended it; send the request again")
        return None

    def close(self) -> None:
        """Start none from now on."""
        with self._lock:
            self._closed = True

    def kill(self) -> None:
        """End it; idempotent."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what it has not read
                        pipe.close()

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable(f"{_NOBODY}: this process is about to end")
            try:  # asyncio's own would fork, of which jax and gRPC warn; this does not
                self._process = subprocess.Popen(
                    _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise Unavailable(f"{_NOBODY}: {error}") from error

    def _say(self, value: dict[str, object]) -> bool:
        """False: it has ended."""
        process = self._process
        if process is None or process.stdin is None:
            return False
        try:
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):  # ValueError: it was killed from here meanwhile
            return False
        return True

    def _read(self) -> bytes:
        """A line; empty: it has ended."""
        process = self._process
        try:
            line = process.stdout.readline() if process is not None and process.stdout is not None else b""
        except ValueError:  # likewise
            return b""
        return line if line.endswith(b"\n") else b""
