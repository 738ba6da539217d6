"""Lines that somebody reads, late or never."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import TextIO

import pytest

from jdisagg.core import outlet as outlets
from jdisagg.core.outlet import PATIENCE_S, Outlet

LINE = 99 * "x" + "\n"
NUM_LINES = 2000  # more than a pipe holds

LOGS = f"""
import logging
from jdisagg.core.logs import setup_logs
setup_logs("decode")
for number in range({NUM_LINES}):
    logging.getLogger("x").warning("%d %s", number, 90 * "x")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Its end to read from, and the stream of the other."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    os.close(reader)


def read_all(reader: int) -> str:
    """What is there now."""
    text = b""
    while select.select([reader], [], [], 0)[0] and (part := os.read(reader, 2**20)):
        text += part
    return text.decode()


def test_a_pipe_that_nobody_reads_keeps_nobody_and_tells_its_late_reader_what_was_lost(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    outlet, began_s = Outlet(stream), monotonic()
    for _ in range(NUM_LINES):
        outlet.write(LINE)
    assert monotonic() - began_s < NUM_LINES / 10 * PATIENCE_S
    kept = read_all(reader)
    outlet.write("at last\n")
    told, last = read_all(reader).splitlines()
    assert kept.count("\n") + int(told[1:].split()[0]) == NUM_LINES
    assert told.endswith("lines were lost here: nobody read them)")
    assert last == "at last"
    outlet.write("and on\n")
    assert read_all(reader) == "and on\n"


def test_a_slow_reader_gets_everything(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "PATIENCE_S", 60.0)  # a busy machine may keep a thread from reading for as long as that is
    reader, stream = pipe
    outlet, text = Outlet(stream), []

    def read() -> None:
        while part := os.read(reader, 512):
            text.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(NUM_LINES):
        outlet.write(LINE)
    outlet.write(2**20 * "y" + "\n")
    stream.close()
    thread.join()
    assert b"".join(text).decode() == NUM_LINES * LINE + 2**20 * "y" + "\n"


@pytest.mark.parametrize("lines", [[2**18 * "y" + "\n"], NUM_LINES * [LINE]])
def test_a_reader_that_is_slow_for_ever_keeps_nobody(pipe: tuple[int, TextIO], lines: list[str]) -> None:
    """In time of the reader's, in which this process moves: to be waited for it would have to read more than thirty times."""
    reader, stream = pipe
    ended, reads = threading.Event(), list[bytes]()

    def read() -> None:
        while not ended.wait(0.75 * PATIENCE_S):
            reads.append(os.read(reader, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    outlet = Outlet(stream)
    for line in lines:
        outlet.write(line)
    num_reads = len(reads)
    ended.set()
    thread.join()
    assert num_reads < 15


def test_a_terminal_that_nobody_reads_keeps_nobody() -> None:
    """It has room for a part of a line before it has none."""
    reader, terminal = os.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        outlet = Outlet(stream)
        thread = threading.Thread(target=lambda: [outlet.write(LINE) for _ in range(NUM_LINES)], daemon=True)
        thread.start()
        thread.join(60.0)
        was_kept = thread.is_alive()
        os.close(reader)
        assert not was_kept


def test_a_line_that_was_cut_ends_before_the_next_one(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    outlet = Outlet(stream)
    outlet.write(2**20 * "y" + "\n")
    cut = read_all(reader)
    assert 0 < len(cut) < 2**20
    outlet.write("whole\n")
    assert read_all(reader) == "\n(1 lines were lost here: nobody read them)\nwhole\n"


def test_lines_that_were_told_of_are_not_told_of_again(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    outlet = Outlet(stream)
    outlet.write(2**20 * "y" + "\n")
    os.read(reader, 8192)
    outlet.write(2**20 * "z" + "\n")
    assert "(1 lines were lost here" in read_all(reader)
    outlet.write("whole\n")
    assert read_all(reader) == "\n(1 lines were lost here: nobody read them)\nwhole\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_was_full_has_what_was_written_since_on_lines_of_its_own_and_how_many_were_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = [150], os.write  # bytes

    def write_there(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(number, os.strerror(number))
        taken = write(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write_there)
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as stream:
        outlet = Outlet(stream)
        for _ in range(3):
            outlet.write(LINE)
        room[0] = 1000
        outlet.write("at last\n")
        outlet.write("and on\n")
    whole, *rest = path.read_text().splitlines()
    assert (whole, rest[0]) == (99 * "x", 50 * "x")
    assert rest[1:] == ["(2 lines were lost here: the disk was full)", "at last", "and on"]


def test_a_reader_that_has_gone_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream, pytest.raises(BrokenPipeError):
        Outlet(stream).write(LINE)


def test_what_no_encoding_holds_and_what_is_no_file_are_written_all_the_same() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii", errors="backslashreplace") as stream:
        Outlet(stream).write("größer\n")
    assert read_all(reader) == "gr\\xf6\\xdfer\n"
    os.close(reader)
    memory = StringIO()
    Outlet(memory).write(LINE)
    assert memory.getvalue() == LINE


def test_a_process_whose_log_nobody_reads_ends() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", LOGS], stderr=writer) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    os.close(writer)
    assert "decode[" in read_all(reader)
    os.close(reader)
