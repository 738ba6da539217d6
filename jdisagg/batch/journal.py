"""What makes a batch survive kill -9: an append-only journal beside the output, and one atomic rename at the end.

    OUTPUT.journal     header line, then "NUMBER CRC32 JSON" per finished input line, in order of finishing, fsynced; the CRC32
                       is that of "NUMBER JSON": an answer cannot become another line's
    OUTPUT.tmp         written from the journal in input order once every line has finished, fsynced
    OUTPUT             the renamed .tmp; only then is the journal removed

A process that starts again reads the journal, cuts off a torn tail and does only what is missing. A full disk costs no more
than a kill. Two processes cannot hold one journal: it is locked.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from jdisagg.batch import strict_json
from jdisagg.core.errors import ConfigError, JdisaggError
from jdisagg.core.files import lock

CREATED = "created"  # in the header: a time, that of the run that began it
_HEADER_START = b'{"journal":'  # of every journal: another file of that name is not overwritten
_LONGEST_NUMBER = 18  # digits of an input line's number


class WriteFailed(JdisaggError):
    """The disk took no more. What was appended before is safe."""


class Journal:
    """Finished lines of one batch, on disk. Use as a context manager; one thread at a time."""

    def __init__(self, output: Path, header: dict[str, Any]) -> None:
        """Open or create the journal of `output`. Raises ConfigError when it is another batch's, in use or no journal."""
        self.path = journal_path(output)
        self._output = output
        self._file = _open(self.path)
        self.created = int(header.get(CREATED, 0))
        self._lines: dict[int, tuple[int, int]] = {}  # input line -> offset and size of its JSON in the journal
        try:
            _lock(self._file, self.path)
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

    def lines(self) -> Iterator[dict[str, Any]]:
        """Those output lines, read again."""
        for offset, size in self._lines.values():
            yield strict_json.decode(os.pread(self._file.fileno(), size, offset))

    def append(self, finished: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Make (input line number, output line) pairs durable; returns when they are on disk. Raises WriteFailed."""
        end = self._file.seek(0, os.SEEK_END)
        block = bytearray()
        added: dict[int, tuple[int, int]] = {}
        for number, line in finished:
            assert number not in self._lines, f"line {number} finished twice"
            assert number not in added, f"line {number} finished twice"
            text = strict_json.encode(line)
            prefix = b"%d %08x " % (number, _crc(b"%d" % number, text))
            added[number] = (end + len(block) + len(prefix), len(text))
            block += prefix + text + b"\n"
        self._write(block)
        self._lines |= added

    def publish(self, numbers: Iterable[int]) -> None:
        """Write the output in the order of `numbers`, the input's lines, rename it into place and remove the journal. What was
        written of it goes when that fails.

        Raises ConfigError when one of them was not done, WriteFailed when the disk takes no more."""
        numbers = list(numbers)
        self._check_all_done(numbers)
        temporary = temporary_path(self._output)
        with _failing_as_write(temporary):
            try:
                self._write_output(temporary, numbers)
            except OSError:
                with suppress(OSError):
                    if temporary.is_file():  # the disk that is full needs the room
                        temporary.unlink()
                raise
            temporary.replace(self._output)
            _sync_directory(self._output.parent)
            self.path.unlink()
            _sync_directory(self._output.parent)

    def _write_output(self, path: Path, numbers: list[int]) -> None:
        with path.open("wb") as out:
            for number in numbers:
                offset, size = self._lines[number]
                out.write(os.pread(self._file.fileno(), size, offset) + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def _check_all_done(self, numbers: list[int]) -> None:
        missing = next((number for number in numbers if number not in self._lines), None)
        if missing is not None:
            raise ConfigError(
                f"the input changed while its batch ran: line {missing} was not there to be answered; put the input back as it "
                f"was and repeat the command to get what was answered, or remove {self.path} to begin anew"
            )

    def _recover(self, header: dict[str, Any]) -> None:
        self._file.seek(0)
        first = self._file.readline()
        found = _read_header(self.path, first)
        if found is None:
            self._file.truncate(0)
            self._write(strict_json.encode(header) + b"\n")
            with _failing_as_write(self.path):
                _sync_directory(self.path.parent)
            return
        _check_header(self.path, found, header, found.keys() | header.keys())
        self.created = int(found.get(CREATED, self.created))
        good = len(first)
        for raw in self._file:
            number, prefix, text = _decode(raw)
            if number is None:
                break
            self._lines[number] = (good + prefix, len(text))
            good += len(raw)
        self._file.truncate(good)

    def _write(self, block: bytes | bytearray) -> None:
        """Past the file object, whose buffer would write what is left of a failed block at `close`."""
        rest = memoryview(block)
        with _failing_as_write(self.path):
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())


def temporary_path(output: Path) -> Path:
    """Where `output` is written before it gets its name."""
    return output.with_name(output.name + ".tmp")


def journal_path(output: Path) -> Path:
    """Where the journal of `output` lies."""
    return output.with_name(output.name + ".journal")


def check_journal(output: Path, header: dict[str, Any]) -> None:
    """Raise ConfigError for a journal that `Journal` would refuse, as far as `header` tells; nothing is written. For before an
    engine is loaded."""
    path = journal_path(output)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written; mend that or choose another --output")
    if not path.exists():
        return
    with path.open("rb") as file:
        _lock(file, path)
        if (found := _read_header(path, file.readline())) is not None:
            _check_header(path, found, header, header.keys())


def _lock(file: BinaryIO, path: Path) -> None:
    lock(file, str(path), taken="is running this batch; wait for it or end it", choose="choose an --output")


def _check_header(path: Path, found: dict[str, Any], wanted: dict[str, Any], keys: Set[str]) -> None:
    differing = sorted(key for key in keys - {CREATED} if found.get(key) != wanted.get(key))
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{path} belongs to another batch: its {key} is {found.get(key)!r}, this one's is {wanted.get(key)!r}; "
            "repeat the command that began it, choose another --output, or remove the journal to begin anew"
        )


def _read_header(path: Path, first: bytes) -> dict[str, Any] | None:
    """The header in a journal's first line; None in a new journal, or one that died inside that line."""
    if first.startswith(_HEADER_START[: len(first)]):
        if not first.endswith(b"\n"):
            return None
        try:
            return strict_json.decode(first)
        except ValueError:
            pass  # refused below
    raise ConfigError(f"{path} is no journal of a batch, or a broken one: remove it to begin anew, or choose another --output")


def _decode(raw: bytes) -> tuple[int | None, int, bytes]:
    """(input line, length of the prefix, JSON) of a journal line; (None, ..) when it is torn."""
    number, _, rest = raw.partition(b" ")
    crc, _, text = rest.removesuffix(b"\n").partition(b" ")
    whole = raw.endswith(b"\n") and number.isdigit() and len(number) <= _LONGEST_NUMBER and crc == b"%08x" % _crc(number, text)
    return (int(number) if whole else None, len(number) + len(crc) + 2, text)


def _crc(number: bytes, text: bytes) -> int:
    return zlib.crc32(b"%b %b" % (number, text))


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("a+b")
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}; mend that or choose another --output") from error


@contextmanager
def _failing_as_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            f"{path} cannot be written: {error.strerror}; what was answered stays in the journal: free space there or mend "
            "that, then run the same command again to go on from here"
        ) from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # as CIFS and 9p say that of directories they have nothing to write
            raise
    finally:
        os.close(handle)
