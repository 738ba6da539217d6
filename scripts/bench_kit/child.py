"""A process beside the bench that is led through a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

START_S, STEP_S = 150.0, 180.0  # on the busiest machine


class Child:
    """One spawned process that answers each message on its pipe with one."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe

    def tell(self, what: object) -> None:
        """Send what is not answered. Raises RuntimeError when the process has ended."""
        try:
            self._pipe.send(what)
        except OSError as error:
            raise RuntimeError(f"process {self.pid} has ended") from error

    def ask(self, what: object, timeout_s: float = STEP_S) -> Any:
        """Raises RuntimeError when no answer comes, or it is an error."""
        self.tell(what)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> Any:
        """The next answer. Raises as `ask` does."""
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"process {self.pid} has not answered within {timeout_s:g} s")
        try:
            said = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"process {self.pid} has ended") from error
        if isinstance(said, Exception):
            raise RuntimeError(f"process {self.pid}: {said!r}") from said
        return said


@contextmanager
def child(main: Callable[..., None], *args: object, start_s: float = START_S) -> Iterator[tuple[Child, Any]]:
    """A process that runs `main(pipe, *args)`, and what it said first; killed at the end. Raises RuntimeError when it says
    nothing for `start_s`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=main, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        started = Child(process.pid, ours)
        yield started, started.answer(start_s)
    finally:
        process.kill()
        process.join(10)
