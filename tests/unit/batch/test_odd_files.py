"""Files in the way of a batch, and a disk that is full: one line says what to change, and nothing that was done is lost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, journal_path, temporary_path
from jdisagg.batch.runner import Batch
from jdisagg.core.errors import ConfigError
from tests.unit.batch.fake_server import serving
from tests.unit.batch.test_batch import arguments

HEADER = {"journal": 1, "seed": 0}
NOWHERE = "http://127.0.0.1:9"  # nobody is asked


def source_in(directory: Path, lines: str) -> Path:
    path = directory / "in.jsonl"
    path.write_text(lines, encoding="utf-8")
    return path


@pytest.mark.parametrize("raw", [b"garbage\n", b"garbage", b"\xff\xfe\0\n", b"[1,2]\n", b'{"journal":1,"x":\n', b'{"a":1}\n'])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, raw: bytes) -> None:
    output = tmp_path / "out.jsonl"
    journal_path(output).write_bytes(raw)
    with pytest.raises(ConfigError, match="remove it to begin anew, or choose another --output"):
        Journal(output, HEADER)
    assert journal_path(output).read_bytes() == raw


def test_a_journal_line_with_a_huge_number_is_torn(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, HEADER) as journal:
        journal.append([(1, {"id": 1})])
    with journal_path(output).open("ab") as file:
        file.write(b"1" * 5000 + b" %08x {}\n" % zlib.crc32(b"{}"))
    with Journal(output, HEADER) as journal:
        assert len(journal) == 1


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.tmp"])
def test_a_directory_in_the_way_is_told_of_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = source_in(tmp_path, '{"prompt": "x"}\n')
    (tmp_path / name).mkdir()
    assert main(arguments(source, tmp_path / "out.jsonl", NOWHERE)) == 2
    assert f"{name}' is a directory; remove it or choose another --output" in capsys.readouterr().err


def test_a_journal_that_cannot_be_opened_is_told_of(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    journal_path(output).symlink_to(tmp_path / "no" / "such")
    with pytest.raises(ConfigError, match="cannot be opened: No such file or directory; mend that or choose another --output"):
        Journal(output, HEADER)


@pytest.mark.parametrize("rest", [{}, {"response": 5}, {"response": {}}, {"response": []}])
def test_an_output_with_the_right_ids_that_a_batch_did_not_write_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: dict[str, object]
) -> None:
    source, output = source_in(tmp_path, '{"prompt": "x"}\n'), tmp_path / "out.jsonl"
    batch = Batch(input=source, output=output)
    output.write_text(json.dumps({"id": f"batch_{batch.id}_1", **rest}) + "\n")
    assert main(arguments(source, output, NOWHERE)) == 2
    assert "engine); remove it or choose another --output" in capsys.readouterr().err


def test_an_output_too_deep_to_read_is_refused(tmp_path: Path) -> None:
    source, output = source_in(tmp_path, '{"prompt": "x"}\n'), tmp_path / "out.jsonl"
    output.write_text("[" * 90_000 + "]" * 90_000 + "\n")
    assert main(arguments(source, output, NOWHERE)) == 2


def test_a_disk_that_fills_up_stops_the_batch_and_costs_nothing_that_was_answered(tmp_path: Path) -> None:
    source = source_in(tmp_path, "".join(f'{{"prompt": "{i} {"long " * 100}"}}\n' for i in range(40)))
    calm, full = tmp_path / "calm.jsonl", tmp_path / "full.jsonl"
    with serving() as server:
        assert main(arguments(source, calm, server.url)) == 0
    with serving() as server:
        flags = arguments(source, full, server.url, "--max-concurrency", "2")
        command = shlex.join([sys.executable, "-m", "jdisagg.batch", *flags])
        stopped = subprocess.run(
            ["bash", "-c", f"ulimit -f 8; exec {command}"], capture_output=True, text=True, timeout=60, check=False
        )
        assert stopped.returncode == 1
        assert "Traceback" not in stopped.stderr
        assert "full.jsonl.journal cannot be written: File too large" in stopped.stderr.splitlines()[-1]
        assert "run the same command again" in stopped.stderr.splitlines()[-1]
        kept = journal_path(full).read_bytes().count(b"\n") - 1
        assert 5 < kept < 40
        server.asked.clear()
        assert main(flags) == 0
        assert server.asked.total() == 40 - kept
    assert full.read_bytes() == calm.read_bytes()


def test_a_disk_that_has_no_room_for_the_output_keeps_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = source_in(tmp_path, '{"prompt": "x"}\n'), tmp_path / "out.jsonl"
    temporary_path(output).symlink_to("/dev/full")
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 1
        assert "out.jsonl.tmp cannot be written: No space left on device" in capsys.readouterr().err
        temporary_path(output).unlink()
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
