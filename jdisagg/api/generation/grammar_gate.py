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
import sys
from dataclasses import asdict
from time import monotonic

from jdisagg.core.errors import InvalidRequest, Overloaded
from jdisagg.core.logs import Seldom
from jdisagg.core.requests import Grammar
from jdisagg.text.grammar import Grammars
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
        self._checker: asyncio.subprocess.Process | None = None
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
        await self._end_checker()

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
        answer = b""
        try:
            async with asyncio.timeout(MOST_S + _GRACE_S if self._is_there else _START_S):
                checker = await self._started()
                assert checker.stdin is not None
                assert checker.stdout is not None
                checker.stdin.write(_line({"kind": grammar.kind.value, "text": grammar.text}))
                await checker.stdin.drain()
                answer = await checker.stdout.readline()
        except (TimeoutError, ConnectionError):
            pass
        except BaseException:
            await self._end_checker()  # its answer would be taken for that to the next question
            raise
        if answer.endswith(b"\n"):
            return json.loads(answer)["error"]
        await self._end_checker()
        text, what = "a grammar (%s, %d characters) ended the process that checks them", (grammar.kind.value, len(grammar.text))
        self._told.say(log, logging.WARNING, text, *what, now_s=monotonic())
        return _ENDLESS

    @property
    def _is_there(self) -> bool:
        return self._checker is not None and self._checker.returncode is None

    async def _started(self) -> asyncio.subprocess.Process:
        if self._checker is not None and self._is_there:
            return self._checker
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        checker = self._checker = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, stderr=nowhere)
        assert checker.stdin is not None
        checker.stdin.write(_line(asdict(self._grammars.vocabulary)))
        await checker.stdin.drain()
        return checker

    async def _end_checker(self) -> None:
        checker, self._checker = self._checker, None
        if checker is not None:
            if checker.returncode is None:
                checker.kill()
            await checker.wait()


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"
