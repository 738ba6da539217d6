"""Where lines go that somebody should be reading, stderr: where nobody does they are lost and counted, and the process goes on.

A pipe holds 64 KiB, and a write to a full one waits for its reader. A log shipper that hangs would stop every thread that logs,
and with the event loop heartbeats, streams and SIGTERM.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 0.2  # for a reader that is slow; less than the silence after which others take a process for dead
ROOM_BYTES = 4096  # a pipe that takes anything takes so many, of its page; POSIX's PIPE_BUF at most


class Outlet:
    """Lines to one stream. One thread at a time."""

    def __init__(self, stream: TextIO, remark: Callable[[str], str] = "({})".format) -> None:
        """`remark` makes a line of what is said of lost ones."""
        self._stream = stream
        self._remark = remark
        self._num_lost = 0  # lines, since the last one that was written
        self._is_cut = False  # in the middle of a line

    def write(self, text: str) -> None:
        """Write lines, at once; those that nobody reads are lost, from the first one that waited for PATIENCE_S to the next one
        that need not wait. Raises OSError or ValueError where the stream takes nothing ever."""
        number = _descriptor(self._stream)
        if number is None:
            self._stream.write(text)
            self._stream.flush()
            return
        had_lost = self._num_lost
        told = self._remark(f"{had_lost} lines were lost here: nobody read them") + "\n" if had_lost else ""
        lines = ("\n" if self._is_cut else "") + told + text
        data = lines.encode(self._stream.encoding or "utf-8", self._stream.errors or "backslashreplace")
        taken = self._give(number, data)
        if taken:
            self._is_cut = taken < len(data)
        self._num_lost = 0 if taken == len(data) else had_lost + max(1, text.count("\n"))

    def _give(self, number: int, data: bytes) -> int:
        """How many bytes were taken."""
        taken = 0
        while taken < len(data):
            if not _has_room(number, 0.0 if self._num_lost else PATIENCE_S):
                break
            try:
                taken += os.write(number, data[taken : taken + ROOM_BYTES])
            except BlockingIOError:  # others write there, too
                break
        return taken


def _descriptor(stream: TextIO) -> int | None:
    """Of what the operating system knows; None of an object in memory."""
    try:
        return stream.fileno()
    except (OSError, AttributeError):
        return None


def _has_room(number: int, timeout_s: float) -> bool:
    """Whether a write of ROOM_BYTES ends, if with an error: files and a pipe that nobody will ever read do."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))
