"""What makes a batch survive kill -9: an append-only journal beside the output, and one atomic rename at the end.

    OUTPUT.journal     header line, then "NUMBER CRC32 JSON" per finished input line, in order of finishing, fsynced
    OUTPUT.tmp         written from the journal in input order once every line has finished, fsynced
    OUTPUT             the renamed .tmp; only then is the journal removed

A process that starts again reads the journal, cuts off a torn tail and does only what is missing. Two processes cannot hold
one journal: it is locked.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from jdisagg.batch import strict_json
from jdisagg.core.errors import ConfigError


class Journal:
    """Finished lines of one batch, on disk. Use as a context manager; one thread at a time."""

    def __init__(self, output: Path, header: dict[str, Any]) -> None:
        """Open or create the journal of `output`. Raises ConfigError when it is another batch's or is in use."""
        self.path = journal_path(output)
        self._output = output
        self._file: BinaryIO = self.path.open("a+b")
        self._lines: dict[int, tuple[int, int]] = {}  # input line -> offset and size of its JSON in the journal
        try:
            self._lock()
            self._recover(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def __contains__(self, number: int) -> bool:
        return number in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def append(self, finished: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Make (input line number, output line) pairs durable; returns when they are on disk."""
        end = self._file.seek(0, os.SEEK_END)
        block = bytearray()
        added: dict[int, tuple[int, int]] = {}
        for number, line in finished:
            assert number not in self._lines, f"line {number} finished twice"
            assert number not in added, f"line {number} finished twice"
            text = strict_json.encode(line)
            prefix = b"%d %08x " % (number, zlib.crc32(text))
            added[number] = (end + len(block) + len(prefix), len(text))
            block += prefix + text + b"\n"
        self._file.write(block)
        self._sync()
        self._lines |= added

    def publish(self, numbers: Iterable[int]) -> None:
        """Write the output in the order of `numbers`, rename it into place and remove the journal."""
        temporary = self._output.with_name(self._output.name + ".tmp")
        with temporary.open("wb") as out:
            for number in numbers:
                offset, size = self._lines[number]
                out.write(os.pread(self._file.fileno(), size, offset) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._output)
        _sync_directory(self._output.parent)
        self.path.unlink()
        _sync_directory(self._output.parent)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path}: another process is running this batch; wait for it or end it") from None

    def _recover(self, header: dict[str, Any]) -> None:
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):  # a new journal, or one that died inside its first line
            self._file.truncate(0)
            self._file.write(strict_json.encode(header) + b"\n")
            self._sync()
            _sync_directory(self.path.parent)
            return
        _check_header(self.path, strict_json.decode(first), header)
        good = len(first)
        for raw in self._file:
            number, prefix, text = _decode(raw)
            if number is None:
                break
            self._lines[number] = (good + prefix, len(text))
            good += len(raw)
        self._file.truncate(good)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def journal_path(output: Path) -> Path:
    """Where the journal of `output` lies."""
    return output.with_name(output.name + ".journal")


def _check_header(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{path} belongs to another batch: its {key} is {found.get(key)!r}, this one's is {wanted.get(key)!r}; "
            "repeat the command that began it, choose another --output, or remove the journal to begin anew"
        )


def _decode(raw: bytes) -> tuple[int | None, int, bytes]:
    """(input line, length of the prefix, JSON) of a journal line; (None, ..) when it is torn."""
    number, _, rest = raw.partition(b" ")
    crc, _, text = rest.removesuffix(b"\n").partition(b" ")
    whole = raw.endswith(b"\n") and number.isdigit() and crc == b"%08x" % zlib.crc32(text)
    return (int(number) if whole else None, len(number) + len(crc) + 2, text)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
