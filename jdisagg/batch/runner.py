"""Runs a batch: bounded concurrency over the input lines, every answer journalled before it counts."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jdisagg.batch import strict_json
from jdisagg.batch.journal import CREATED, FINGERPRINT, MODEL, Journal, journal_path
from jdisagg.batch.lines import BadLine, Call, open_input, read_lines_but
from jdisagg.batch.passes import Pauses, tell_of_pass
from jdisagg.batch.results import answer_line, bad_answer_line, error_line, line_id
from jdisagg.batch.sender import Sender
from jdisagg.batch.tries import BadAnswer
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError

# what answers depend on
_ANSWERING = (
    *("model", "load_format", "dtype", "kv_cache_dtype", "max_model_len", "numerics"),
    *("tool_call_parser", "reasoning_parser"),
)
_INPUT = "input_sha256"
_JOURNAL = 3  # the form of journals: lines of form 1 do not name their batch, the CRC32 of form 2 says nothing of the number
Finished = tuple[int, dict[str, Any]]  # input line number, output line


class _Found(NamedTuple):
    """An input as it was when it was first read."""

    sha256: str
    num_bytes: int
    changed_s: int  # time of its last change
    num_lines: int  # that get an output line


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One input file and how to run it."""

    input: Path
    output: Path
    seed: int = 0
    max_concurrency: int = 32
    config: Config | None = None  # of an engine in this process; None = a server answers

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as far as it is known before a server is asked."""
        identity: dict[str, Any] = {_INPUT: self._found.sha256, "seed": self.seed}
        if self.config is not None:
            settings = asdict(self.config.model) | {"numerics": self.config.model.numerics.value}
            identity |= {"--" + name.replace("_", "-"): settings[name] for name in _ANSWERING}
            identity["model"] = self.config.served_name
        return identity

    @cached_property
    def id(self) -> str:
        """Eight hex digits of `identity`."""
        return hashlib.sha256(strict_json.encode(sorted(self.identity.items()))).hexdigest()[:8]

    def request_id(self, call: Call) -> str:
        """Names what is asked, and what the answer depends on besides: it stands for that of another request of the same id."""
        settings = sorted((key, value) for key, value in self.identity.items() if key != _INPUT)
        asked = strict_json.encode([settings, call.custom_id, call.url, call.body])
        return f"batch-{call.number}-{hashlib.sha256(asked).hexdigest()[:16]}"

    def header(self, model: str | None = None, fingerprint: str | None = None) -> dict[str, Any]:
        """What the journal must agree with; `model`: the name of the one that answers, `fingerprint`: of its weights, as far as
        they are known. `created` (seconds) stands in for the time of an answer, so that a resumed run writes what an
        undisturbed one would; a journal that is there keeps its own."""
        who = {key: value for key, value in ((MODEL, model), (FINGERPRINT, fingerprint)) if value is not None}
        return {"journal": _JOURNAL} | who | self.identity | {CREATED: self._found.changed_s}

    @property
    def num_lines(self) -> int:
        """Of the input as it was found, that get an output line."""
        return self._found.num_lines

    @cached_property
    def _found(self) -> _Found:
        digest, num_lines = hashlib.sha256(), 0
        tell_of_pass(self.input, "which batch it is")
        with open_input(self.input) as file:
            changed_s = int(os.fstat(file.fileno()).st_mtime)
            for raw in file:
                digest.update(raw)
                num_lines += bool(raw.strip())
            return _Found(digest.hexdigest(), file.tell(), changed_s, num_lines)

    def numbers(self) -> Iterator[int]:
        """Input lines that get an output line. Raises ConfigError behind the last when the input does not begin as it was
        found; what came behind that has numbers of its own."""
        digest, left_bytes = hashlib.sha256(), self._found.num_bytes
        with open_input(self.input) as file:
            for number, raw in enumerate(file, start=1):
                digest.update(raw[:left_bytes])
                left_bytes = max(0, left_bytes - len(raw))
                if raw.strip():
                    yield number
        if digest.hexdigest() != self._found.sha256:
            raise ConfigError(
                f"the input changed while its batch ran: {self.input} has no longer the lines that it had, and answers may be "
                f"those of others; remove {journal_path(self.output)} to begin anew"
            )


async def run_batch(batch: Batch, journal: Journal, sender: Sender, on_progress: Callable[[int, int], object]) -> None:
    """Do what the journal lacks, then publish the output. `on_progress(done, failed)`: so many lines are durable, so many of
    them failed.

    Raises Unavailable when the server stays away, WriteFailed when the disk is full, ConfigError when the input is gone or
    changed meanwhile; the journal then holds what was answered.
    """
    if len(journal):
        tell_of_pass(batch.input, "what is not answered yet")
    pending = read_lines_but(batch.input, journal, seed=batch.seed)
    answers: asyncio.Queue[Finished | None] = asyncio.Queue(maxsize=batch.max_concurrency)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_write(answers, journal, on_progress))
            await _answer_all(batch, pending, sender, answers, journal.created)
            await answers.put(None)
    except BaseExceptionGroup as failures:
        raise _first(failures) from failures
    await to_its_end(journal.publish, await _numbers(batch))


async def _numbers(batch: Batch) -> list[int]:
    """Raises ConfigError when the input changed meanwhile."""
    numbers: list[int] = []
    pauses = Pauses()
    tell_of_pass(batch.input, "whether it is as it was")
    for number in batch.numbers():
        numbers.append(number)
        await pauses.rest()
    return numbers


async def _answer_all(
    batch: Batch,
    pending: Iterator[Call | BadLine | None],
    sender: Sender,
    answers: asyncio.Queue[Finished | None],
    created: int,
) -> None:
    places = asyncio.Semaphore(batch.max_concurrency)
    pauses = Pauses()

    async def answer(line: Call | BadLine) -> None:
        with ExitStack() as place:
            place.callback(places.release)
            await answers.put((line.number, await _answer(batch, line, sender, created, place.close)))

    async with asyncio.TaskGroup() as group:
        for line in pending:
            await pauses.rest()
            if line is not None:
                await places.acquire()
                group.create_task(answer(line))


async def _answer(
    batch: Batch, line: Call | BadLine, sender: Sender, created: int, set_aside: Callable[[], object]
) -> dict[str, Any]:
    """`set_aside()`: it takes no place beside others from now on, see `Sender.send`."""
    if isinstance(line, BadLine):
        return error_line(line, batch_id=batch.id)
    try:
        status_code, body = await sender.send(line, line_id(batch.id, line.number), set_aside)
    except BadAnswer as error:
        return bad_answer_line(line, error.message, batch_id=batch.id)
    return answer_line(line, status_code, body, batch_id=batch.id, request_id=batch.request_id(line), created=created)


def _first(failures: BaseExceptionGroup) -> BaseException:
    """One failure stops the batch; the others are its echoes."""
    leaf: BaseException = failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf


async def _write(answers: asyncio.Queue[Finished | None], journal: Journal, on_progress: Callable[[int, int], object]) -> None:
    """Journal whatever has gathered, one fsync for all of it, until None comes; cancelled, what is there still."""

    async def append(finished: Sequence[Finished]) -> None:
        if finished:
            await to_its_end(journal.append, finished)
            on_progress(len(journal), journal.num_failed)

    try:
        open_ = True
        while open_:
            gathered = [await answers.get(), *_left(answers)]
            open_ = gathered[-1] is not None
            await append([answer for answer in gathered if answer is not None])
    except asyncio.CancelledError:
        await append([answer for answer in _left(answers) if answer is not None])
        raise


def _left(answers: asyncio.Queue[Finished | None]) -> Iterator[Finished | None]:
    while not answers.empty():
        yield answers.get_nowait()


async def to_its_end(write: Callable[[Any], None], what: Any) -> None:
    """`write(what)` in a thread, which nobody can stop: who is cancelled waits for it, since the journal is closed next."""
    thread = asyncio.ensure_future(asyncio.to_thread(write, what))
    try:
        await asyncio.shield(thread)
    finally:
        while not thread.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({thread})
