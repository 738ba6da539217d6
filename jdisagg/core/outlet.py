"""Where lines go that somebody should be reading, stderr: where nobody does, or a disk is full, they are lost and counted, and
the process goes on.

A pipe holds 64 KiB, and a write to a full one waits for its reader. A log shipper that hangs would stop every thread that logs,
and with the event loop heartbeats, streams and SIGTERM.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TextIO

PATIENCE_S = 0.2  # for a reader that is slow; less than the silence after which others take a process for dead
PATIENCE_SHARE = 0.25  # of the time: one that is slow for ever would slow down whoever logs, and the event loop with it
ROOM_BYTES = 4096  # a pipe that takes anything takes so many, of its page; POSIX's PIPE_BUF at most
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))  # a disk, which may have room for the next line


class Outlet:
    """Lines to one stream. One thread at a time."""

    def __init__(self, stream: TextIO, remark: Callable[[str], str] = "({})".format) -> None:
        """`remark` makes a line of what is said of lost ones."""
        self._stream = stream
        self._remark = remark
        self._num_lost = 0  # lines, since the last one that was written
        self._why_lost = "nobody read them"
        self._is_cut = False  # in the middle of a line
        self._patience_s = PATIENCE_S  # what is left of it
        self._looked_s = monotonic()  # when it was counted last

    def write(self, text: str) -> None:
        """Write lines, at once; those that nobody reads are lost, from the first one that waited for too long to the next one
        that need not wait, and those that a full disk does not take. Raises OSError or ValueError where the stream takes
        nothing ever."""
        number = _descriptor(self._stream)
        if number is None:
            self._stream.write(text)
            self._stream.flush()
            return
        had_lost = self._num_lost
        told = self._remark(f"{had_lost} lines were lost here: {self._why_lost}") + "\n" if had_lost else ""
        head, data = self._encoded(("\n" if self._is_cut else "") + told), self._encoded(text)
        with _never_waiting(number) as own:
            taken = self._give(own, head + data)
        if taken:
            self._is_cut = taken < len(head + data)
        if taken >= len(head):
            had_lost = 0
        self._num_lost = had_lost + (max(1, text.count("\n")) if taken < len(head + data) else 0)

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._stream.encoding or "utf-8", self._stream.errors or "backslashreplace")

    def _give(self, number: int, data: bytes) -> int:
        """How many bytes were taken."""
        taken = 0
        while taken < len(data):
            if not self._has_room(number):
                break
            try:
                taken += os.write(number, data[taken : taken + ROOM_BYTES])
            except BlockingIOError:  # others write there, too
                break
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._why_lost = "the disk was full"
                break
        return taken

    def _has_room(self, number: int) -> bool:
        """Whether a write of ROOM_BYTES ends, if with an error: files and a pipe that nobody will ever read do."""
        began_s = monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + PATIENCE_SHARE * (began_s - self._looked_s))
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        found = poll.poll(0.0 if self._num_lost else self._patience_s * 1000)
        self._looked_s = monotonic()
        self._patience_s = max(0.0, self._patience_s - (self._looked_s - began_s))
        return bool(found)


def reopened_pipe(number: int) -> int | None:
    """Another descriptor of the pipe `number`, in which a write never waits, the caller's to close; None where that is no pipe,
    or somebody else's. O_NONBLOCK of `number` would be that of its other writers, too."""
    return _reopened(number) if _is_pipe(number) else None


@contextmanager
def _never_waiting(number: int) -> Iterator[int]:
    """The same pipe or terminal, in which a write never waits, whatever others write there; else `number` itself.

    A terminal says that it has room when it has some, and keeps whoever writes more."""
    own = _reopened(number) if _is_pipe(number) or os.isatty(number) else None
    try:
        yield number if own is None else own
    finally:
        if own is not None:
            os.close(own)


def _is_pipe(number: int) -> bool:
    return stat.S_ISFIFO(os.fstat(number).st_mode)


def _reopened(number: int) -> int | None:
    with suppress(OSError):  # it may be somebody else's
        return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return None


def _descriptor(stream: TextIO) -> int | None:
    """Of what the operating system knows; None of an object in memory."""
    try:
        return stream.fileno()
    except (OSError, AttributeError):
        return None
