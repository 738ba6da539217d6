"""Grammars of clients are compiled in a process of their own first: one that no compiler survives ends that process alone.

    compiled lately -> nothing to do
    refused lately  -> refused
    else            -> the checker compiles it, then a thread here does

One check at a time; requests with the same grammar share it, and who waits no longer ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from time import monotonic

from jdisagg.core.errors import InvalidRequest, Overloaded
from jdisagg.core.logs import Seldom
from jdisagg.core.requests import Grammar
from jdisagg.text.grammar import Grammars, Vocabulary
from jdisagg.text.grammar_checker import MOST_S

MOST_WAITING = 16  # grammars that nobody has seen, each of which may take MOST_S
MOST_REFUSED = 256  # that are remembered
_GRACE_S = 1.0  # beyond MOST_S the checker ends itself
_START_S = 30.0  # a Python interpreter, and a large tokenizer to read
_TOLD_EVERY_S = 10.0
_COMMAND = (sys.executable, "-m", "jdisagg.text.grammar_checker")
_ENDLESS = "grammar: to compile it takes too long or too much memory; make it simpler"

log = logging.getLogger(__name__)


class GrammarGate:
    """Lets grammars into `grammars`. Use from one event loop; the checker starts with the first grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._refused: dict[Grammar, str] = {}
        self._checks: dict[Grammar, asyncio.Task[str]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._checker = _Checker(grammars.vocabulary)
        self._told = Seldom(_TOLD_EVERY_S)

    async def prepare(self, grammar: Grammar) -> None:
        """When this returns, engines of this process take no time for it. Raises InvalidRequest, and Overloaded while too many
        others are looked at."""
        if self._grammars.has(grammar):
            return
        if (error := self._refused.get(grammar)) is None:
            error = await asyncio.shield(self._check(grammar))
        if error:
            raise InvalidRequest(error, field="grammar")

    async def aclose(self) -> None:
        """End the checker."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.to_thread(self._checker.kill)

    def _check(self, grammar: Grammar) -> asyncio.Task[str]:
        if (task := self._checks.get(grammar)) is None:
            if len(self._checks) >= MOST_WAITING:
                raise Overloaded(f"{MOST_WAITING} new grammars are being checked; send the request again", retry_after_s=MOST_S)
            task = self._checks[grammar] = asyncio.create_task(self._checked(grammar))
            task.add_done_callback(lambda _: self._checks.pop(grammar, None))
        return task

    async def _checked(self, grammar: Grammar) -> str:
        """What is wrong with it; "" = it is compiled here."""
        async with self._one_at_a_time:
            error = await self._ask(grammar)
        if not error:
            try:
                await asyncio.to_thread(self._grammars.compile, grammar)
            except InvalidRequest as refused:
                error = refused.message
        if error:
            self._refused[grammar] = error
            if len(self._refused) > MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
        return error

    async def _ask(self, grammar: Grammar) -> str:
        limit_s = MOST_S + _GRACE_S + (0.0 if self._checker.is_there else _START_S)
        asked = asyncio.create_task(asyncio.to_thread(self._checker.ask, grammar))
        try:
            await asyncio.wait({asked}, timeout=limit_s)
        finally:
            if not asked.done():
                self._checker.kill()  # which ends the waiting
        if (error := await asked) is not None:
            return error
        text, what = "a grammar (%s, %d characters) ended the process that checks them", (grammar.kind.value, len(grammar.text))
        self._told.say(log, logging.WARNING, text, *what, now_s=monotonic())
        return _ENDLESS


class _Checker:
    """The other process, from here. `ask` blocks, for one thread at a time; `kill` may come from any."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def ask(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar, "" = nothing; None: the process has not survived it."""
        try:
            if not self.is_there:
                self._start()
            return self._answer({"kind": grammar.kind.value, "text": grammar.text})
        except OSError:  # it ended before it had read all
            self.kill()
            return None

    def kill(self) -> None:
        """End it; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what it has not read
                        pipe.close()

    def _start(self) -> None:
        # asyncio's own would fork, of which jax and gRPC warn; this does not
        self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._write(asdict(self._vocabulary))

    def _answer(self, question: dict[str, object]) -> str | None:
        process = self._process
        self._write(question)
        answer = process.stdout.readline() if process is not None and process.stdout is not None else b""
        if answer.endswith(b"\n"):
            return json.loads(answer)["error"]
        self.kill()
        return None

    def _write(self, value: dict[str, object]) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
