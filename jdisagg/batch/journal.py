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
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from jdisagg.batch import strict_json
from jdisagg.batch.passes import tell_of_pass
from jdisagg.batch.results import is_answered_as_written
from jdisagg.core.errors import ConfigError, JdisaggError
from jdisagg.core.files import lock

log = logging.getLogger(__name__)

CREATED = "created"  # in the header: a time, that of the run that began it
MODEL, FINGERPRINT = "model", "fingerprint"  # .. who answers
_ASKED_FOR = frozenset({MODEL, FINGERPRINT})  # and may not be known before
_HEADER_START = b'{"journal":'  # of every journal: another file of that name is not overwritten
_LONGEST_NUMBER = 18  # digits of an input line's number


class WriteFailed(JdisaggError):
    """The disk took no more. What was appended before is safe."""


class Journal:
    """Finished lines of one batch, on disk. Use as a context manager; one thread at a time."""

    def __init__(self, output: Path, header: dict[str, Any], *, begun: bool = False) -> None:
        """Open or create the journal of `output`; one that was `begun` is not created, and who answers may be missing in
        `header`: see `check`. Raises ConfigError when it is another batch's, in use or no journal, FileNotFoundError when none
        was `begun`."""
        self.path = journal_path(output)
        self._output = output
        self._file = _open(self.path, begun=begun)
        self._header = header
        self._starts: dict[int, int] = {}  # input line -> where its JSON begins in the journal, which ends with its line
        self.num_failed = 0  # of these, not answered with HTTP status 200
        try:
            taken, choose = "is running this batch; wait for it or end it", "choose an --output"
            lock(self._file, str(self.path), taken=taken, choose=choose)
            self._recover(begun=begun)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def __contains__(self, number: int) -> bool:
        return number in self._starts

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def created(self) -> int:
        """The time in all of its lines."""
        return int(self._header.get(CREATED, 0))

    def check(self, header: dict[str, Any], unknown: Set[str] = frozenset()) -> None:
        """Raise ConfigError when it is the journal of another batch than `header` says, but for what is `unknown`."""
        keys = (self._header.keys() | header.keys()) - unknown - {CREATED}
        differing = sorted(key for key in keys if self._header.get(key) != header.get(key))
        if differing:
            key = differing[0]
            raise ConfigError(
                f"{self.path} belongs to another batch: its {key} is {self._header.get(key)!r}, this one's is "
                f"{header.get(key)!r}; repeat the command that began it, choose another --output, or remove the journal to "
                "begin anew"
            )

    def append(self, finished: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Make (input line number, output line) pairs durable; returns when they are on disk. Raises WriteFailed."""
        end = self._file.seek(0, os.SEEK_END)
        block = bytearray()
        added: dict[int, int] = {}
        num_failed = 0
        for number, line in finished:
            assert number not in self._starts, f"line {number} finished twice"
            assert number not in added, f"line {number} finished twice"
            text = strict_json.encode(line)
            prefix = b"%d %08x " % (number, _crc(b"%d" % number, text))
            added[number] = end + len(block) + len(prefix)
            num_failed += not is_answered_as_written(text)
            block += prefix + text + b"\n"
        self._write(block)
        self._starts |= added
        self.num_failed += num_failed

    def publish(self, numbers: Iterable[int]) -> None:
        """Write the output in the order of `numbers`, the input's lines, rename it into place and remove the journal. What was
        written of it goes when that fails.

        Raises ConfigError when one of them was not done, WriteFailed when the disk takes no more."""
        numbers = list(numbers)
        self._check_all_done(numbers)
        tell_of_pass(self.path, "the output is written")
        temporary = temporary_path(self._output)
        with _failing_as_write(temporary):
            try:
                self._write_output(temporary, numbers)
            except BaseException:
                with suppress(OSError):
                    if temporary.is_file():  # a disk that is full needs the room
                        temporary.unlink()
                raise
            temporary.replace(self._output)
            _sync_directory(self._output.parent)
            self.remove()
            _sync_directory(self._output.parent)

    def remove(self) -> None:
        """Whoever waits for its lock finds none, and may have removed it."""
        self.path.unlink(missing_ok=True)

    def _write_output(self, path: Path, numbers: list[int]) -> None:
        with path.open("wb") as out:
            for number in numbers:
                self._file.seek(self._starts[number])
                out.write(self._file.readline())
            out.flush()
            os.fsync(out.fileno())

    def _check_all_done(self, numbers: list[int]) -> None:
        missing = next((number for number in numbers if number not in self._starts), None)
        if missing is not None:
            raise ConfigError(
                f"the input changed while its batch ran: line {missing} was not there to be answered; put the input back as it "
                f"was and repeat the command to get what was answered, or remove {self.path} to begin anew"
            )

    def _recover(self, *, begun: bool) -> None:
        self._file.seek(0)
        first = self._file.readline()
        found, wanted = _read_header(self.path, first), self._header
        if found is None:
            if begun:
                raise FileNotFoundError(self.path)
            self._file.truncate(0)
            self._write(strict_json.encode(wanted) + b"\n")
            with _failing_as_write(self.path):
                _sync_directory(self.path.parent)
            return
        self._header = found
        self.check(wanted, unknown=_ASKED_FOR - wanted.keys() if begun else frozenset())
        tell_of_pass(self.path, "what was answered before")
        good = len(first)
        for raw in self._file:
            number, prefix, text = _decode(raw)
            if number is None:
                break
            self._starts[number] = good + prefix
            self.num_failed += not is_answered_as_written(text)
            good += len(raw)
        self._cut(good)

    def _cut(self, good: int) -> None:
        """Off what is torn; more than that is told of, since it is asked again."""
        lost = self._file.seek(0, os.SEEK_END) - good
        self._file.seek(good)
        if self._file.readline().endswith(b"\n"):
            told = "%s is damaged at byte %d: that line and all behind it, %d bytes, are asked again"
            log.warning(told, self.path, good, lost)
        self._file.truncate(good)

    def _write(self, block: bytes | bytearray) -> None:
        """Past the file object, whose buffer would write what is left of a failed block at `close`."""
        rest = memoryview(block)
        with _failing_as_write(self.path):
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())


def left_journal(output: Path, known: dict[str, Any]) -> Journal | None:
    """That which a former run left, locked; None when none was begun. `known`: of its header, before whoever answers is asked.
    Raises ConfigError for one that another batch began, or that is in use or no journal."""
    try:
        return Journal(output, known, begun=True)
    except FileNotFoundError:
        return None


def check_writable(output: Path) -> None:
    """Raise ConfigError when no journal can be created there. For before an engine is loaded."""
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"{journal_path(output)} cannot be written; mend that or choose another --output")


def temporary_path(output: Path) -> Path:
    """Where `output` is written before it gets its name."""
    return output.with_name(output.name + ".tmp")


def journal_path(output: Path) -> Path:
    """Where the journal of `output` lies."""
    return output.with_name(output.name + ".journal")


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


def _open(path: Path, *, begun: bool) -> BinaryIO:
    """For appending, whether a former run left it or not: over NFS, who locks a file must be able to write it."""
    try:
        return open(path, "a+b", opener=_open_begun if begun else None)
    except OSError as error:
        if begun and isinstance(error, FileNotFoundError):
            raise
        raise ConfigError(f"{path} cannot be opened: {error.strerror}; mend that or choose another --output") from error


def _open_begun(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


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
