"""Files in the way of a batch, and a disk that is full: one line says what to change, and nothing that was done is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, WriteFailed, journal_path, temporary_path
from jdisagg.batch.runner import Batch
from jdisagg.core.errors import ConfigError
from tests.unit.batch.command_line import arguments
from tests.unit.batch.fake_server import serving

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
    with pytest.raises(
        ConfigError, match=r"jsonl\.journal is no journal of .* remove it to begin anew, or choose another --out"
    ):
        Journal(output, HEADER)
    assert journal_path(output).read_bytes() == raw


def test_a_journal_line_with_a_huge_number_is_torn(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, HEADER) as journal:
        journal.append([(1, {"id": 1})])
    with journal_path(output).open("ab") as file:
        file.write(b"1" * 5000 + b" %08x {}\n" % zlib.crc32(b"1" * 5000 + b" {}"))
    with Journal(output, HEADER) as journal:
        assert len(journal) == 1


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.tmp"])
def test_a_file_of_another_user_in_the_way_is_told_of_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = source_in(tmp_path, '{"prompt": "x"}\n')
    (tmp_path / name).touch()
    open_it = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:  # root, as whom tests may run, may read everything
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_it(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(arguments(source, tmp_path / "out.jsonl", NOWHERE)) == 2
    assert "cannot be used: Permission denied; choose another" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.tmp"])
def test_a_directory_in_the_way_is_told_of_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = source_in(tmp_path, '{"prompt": "x"}\n')
    (tmp_path / name).mkdir()
    assert main(arguments(source, tmp_path / "out.jsonl", NOWHERE)) == 2
    assert f"{name}' is a directory; remove it or choose another --output" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.tmp"])
@pytest.mark.timeout(120)
def test_a_pipe_in_the_way_is_told_of_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """/dev/stdout is one: it would be read, to see whether the batch is complete, and never end."""
    source = source_in(tmp_path, '{"prompt": "x"}\n')
    os.mkfifo(tmp_path / name)
    assert main(arguments(source, tmp_path / "out.jsonl", NOWHERE)) == 2
    assert f"{name}' is no regular file; choose another --output" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "length"), [("--output", 250), ("--output", 300), ("--input", 300)])
def test_a_name_that_is_too_long_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, length: int
) -> None:
    """That of the journal may be, where the output's is not."""
    named = {"--input": source_in(tmp_path, '{"prompt": "x"}\n'), "--output": tmp_path / "out.jsonl"} | {
        flag: tmp_path / ("a" * length)
    }
    assert main(arguments(named["--input"], named["--output"], NOWHERE)) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), said.startswith(f"jdisagg.batch: {flag}: "), "File name too long" in said) == (1, True, True)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.tmp"])
def test_an_input_that_the_output_would_overwrite_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = source_in(tmp_path, '{"prompt": "x"}\n').rename(tmp_path / name)
    with serving() as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url)) == 2
    assert f"{name}' is the input and would be overwritten; choose another --output" in capsys.readouterr().err
    assert source.read_text(encoding="utf-8") == '{"prompt": "x"}\n'


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
        limited = f"ulimit -f 8; PYTHONDONTWRITEBYTECODE=1 exec {command}"  # bytecode would be cut off without an error
        stopped = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=150, check=False)
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


def test_an_output_behind_a_link_is_written_there(tmp_path: Path) -> None:
    source, output, volume = source_in(tmp_path, '{"prompt": "x"}\n'), tmp_path / "out.jsonl", tmp_path / "volume"
    volume.mkdir()
    output.symlink_to("volume/answers.jsonl")
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 1
    assert output.is_symlink()
    assert [path.name for path in volume.iterdir()] == ["answers.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "volume"]


def test_an_output_for_which_there_is_no_room_takes_none(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(output, {"journal": 1}) as journal:
        journal.append((number, {"text": "x" * 100}) for number in range(20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        try:
            with pytest.raises(WriteFailed, match=r"out\.jsonl\.tmp cannot be written: File too large"):
                journal.publish(range(20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.journal"]
        journal.publish(range(20))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def ran_while(directory: Path, change: Callable[[Path], object]) -> tuple[int, Path]:
    """Exit status and output of a batch of twelve lines, four at a time, whose input meets `change` when there are answers, and
    before the last ones."""
    source, output = source_in(directory, "".join(f'{{"prompt": "p{n}"}}\n' for n in range(12))), directory / "out.jsonl"
    with serving(meanwhile={"p4": lambda: change(source)}) as server:
        return main(arguments(source, output, server.url, "--max-concurrency", "4")), output


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.write_text("".join(f'{{"prompt": "q{n}"}}\n' for n in range(12)), encoding="utf-8"),
        lambda source: os.truncate(source, 60),
        lambda source: source.with_name("new").rename(source),
    ],
    ids=["edited", "cut", "replaced"],
)
def test_an_input_that_changed_while_its_batch_ran_is_not_answered_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], object]
) -> None:
    (tmp_path / "new").write_text('{"prompt": "p0"}\n', encoding="utf-8")
    status, output = ran_while(tmp_path, change)
    assert status == 2
    assert "the input changed while its batch ran" in capsys.readouterr().err
    assert not output.exists()
    assert journal_path(output).exists()


def test_an_input_that_goes_while_its_batch_runs_is_told_of_and_costs_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output = ran_while(tmp_path, lambda source: source.rename(tmp_path / "elsewhere"))
    assert status == 2
    assert "in.jsonl cannot be read: No such file or directory; mend that and run the same" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(tmp_path / "in.jsonl")
    with serving() as server:
        assert main(arguments(tmp_path / "in.jsonl", output, server.url)) == 0
        assert not server.asked  # all was in the journal


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, -1])
def test_an_input_is_compared_with_what_was_found_to_its_last_byte_and_may_grow(tmp_path: Path, at: int) -> None:
    source = source_in(tmp_path, '{"prompt": "x"}\n' * 150_000)
    batch = Batch(input=source, output=tmp_path / "out.jsonl")
    assert len(batch.id) == 8  # it is found
    raw = source.read_bytes()
    source.write_bytes(raw + b'{}\n{"prompt": "y"}\n')
    assert list(batch.numbers()) == list(range(1, 150_003))
    changed = bytearray(raw)
    changed[at] ^= 1
    for other in (bytes(changed), raw[:-1], b""):
        source.write_bytes(other)
        with pytest.raises(ConfigError, match="the input changed while its batch ran"):
            list(batch.numbers())


def test_a_batch_keeps_the_time_of_the_input_that_it_found(tmp_path: Path) -> None:
    _, output = ran_while(tmp_path, lambda source: os.utime(source, (1, 1)))
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len({line["response"]["body"]["created"] for line in lines}) == 1
