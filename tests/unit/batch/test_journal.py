"""The journal keeps whole lines and nothing else, whatever a crash left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.batch.journal import Journal, WriteFailed, check_writable, journal_path, left_journal
from jdisagg.core.errors import ConfigError

HEADER = {"journal": 1, "seed": 0}


def fill(output: Path, numbers: list[int]) -> None:
    with Journal(output, HEADER) as journal:
        for number in numbers:
            journal.append([(number, {"id": number, "text": "žluť\n"})])


@given(cut=st.integers(min_value=0, max_value=200))
def test_a_journal_cut_anywhere_keeps_every_whole_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    output = tmp_path_factory.mktemp("journal") / "out.jsonl"
    fill(output, [3, 1, 2])
    raw = journal_path(output).read_bytes()
    kept = raw[: max(0, len(raw) - cut)]
    journal_path(output).write_bytes(kept)
    whole = max(0, kept.count(b"\n") - 1)
    with Journal(output, HEADER) as journal:
        assert [number in journal for number in (3, 1, 2)] == [whole > 0, whole > 1, whole > 2]
        journal.append([(number, {"id": number, "text": "žluť\n"}) for number in (1, 2, 3) if number not in journal])
    with Journal(output, HEADER) as journal:
        assert len(journal) == 3, "what comes behind a torn line is not lost with it"
        journal.publish([1, 2, 3])
    assert output.read_text(encoding="utf-8") == "".join(f'{{"id":{n},"text":"žluť\\n"}}\n' for n in (1, 2, 3))
    assert not journal_path(output).exists()


def test_a_damaged_line_and_all_after_it_are_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1, 2, 3])
    raw = journal_path(output).read_bytes()
    journal_path(output).write_bytes(raw.replace(b'"id":2', b'"id":7'))
    with Journal(output, HEADER) as journal:
        assert len(journal) == 1
        assert 1 in journal
    good = journal_path(output).read_bytes()
    assert raw.startswith(good)
    (told,) = caplog.messages
    lost = f"{len(raw) - len(good)} bytes, are asked again"
    assert told == f"{journal_path(output)} is damaged at byte {len(good)}: that line and all behind it, {lost}"


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_of_a_line_that_was_being_written_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1, 2])
    os.truncate(journal_path(output), journal_path(output).stat().st_size - cut)
    with Journal(output, HEADER) as journal:
        assert len(journal) == (1 if cut else 2)
    assert not caplog.messages


@pytest.mark.parametrize("at", range(32))
def test_no_answer_becomes_another_line_s_whatever_byte_is_damaged(tmp_path: Path, at: int) -> None:
    """Line 12 does not become line 13, nor is it lost: what is behind the damage is done again."""
    output = tmp_path / "out.jsonl"
    fill(output, [11, 12])
    raw = bytearray(journal_path(output).read_bytes())
    start = raw.rindex(b"\n12 ") + 1
    raw[start + at] ^= 1
    journal_path(output).write_bytes(raw)
    with Journal(output, HEADER) as journal:
        assert [number for number in range(200) if number in journal] == [11]


def test_an_input_that_grew_while_its_batch_ran_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1, 2, 3])
    with Journal(output, HEADER) as journal:
        with pytest.raises(ConfigError, match="the input changed while its batch ran: line 4 was not there"):
            journal.publish([1, 2, 3, 4])
        assert not output.exists()
        journal.publish([1, 2, 3])
    assert output.read_text(encoding="utf-8").count("\n") == 3


def test_a_journal_of_another_batch_or_in_use_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1])
    with pytest.raises(ConfigError, match=r"out\.jsonl\.journal belongs to another batch: its seed is 0, this one's is 5"):
        Journal(output, HEADER | {"seed": 5})
    with pytest.raises(ConfigError, match="its fingerprint is None, this one's is 'w'"):
        Journal(output, HEADER | {"fingerprint": "w"})
    with pytest.raises(ConfigError, match="its seed is 0, this one's is None"):
        Journal(output, {"journal": 1})
    with Journal(output, HEADER), pytest.raises(ConfigError, match="another process"):
        Journal(output, HEADER)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1])

    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    for opened in (Journal, left_journal):
        with pytest.raises(ConfigError, match=rf"journal cannot be locked: {os.strerror(number)}; choose an --output on a"):
            opened(output, HEADER)


def test_over_nfs_which_locks_for_those_who_may_write_a_batch_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, flock = tmp_path / "out.jsonl", fcntl.flock

    def of_nfs(file: IO[bytes], operation: int) -> None:
        """As fs/nfs/nfs4proc.c has it."""
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    fill(output, [1])
    for opened in (left_journal, Journal):
        journal = opened(output, HEADER)
        assert journal is not None
        with journal:
            assert 1 in journal


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EIO])
def test_a_file_system_that_has_nothing_to_write_of_a_directory_takes_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    output, sync, refused = tmp_path / "out.jsonl", os.fsync, list[int]()

    def of_files_alone(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            refused.append(handle)
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    if number == errno.EIO:  # is no such word
        with pytest.raises(WriteFailed, match=r"out\.jsonl\.journal cannot be written: Input/output error"):
            fill(output, [1])
        return
    fill(output, [1])
    with Journal(output, HEADER) as journal:
        journal.publish([1])
    assert len(refused) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


NUMBERS = st.integers(1, 30) | st.integers(10**17, 10**18 - 1)
ENTRIES = st.dictionaries(NUMBERS, st.dictionaries(st.text(max_size=4), st.text(max_size=9)), max_size=9)


@given(ENTRIES, st.data())
def test_what_is_appended_in_any_order_is_published_in_the_input_s(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[int, dict[str, Any]], data: st.DataObject
) -> None:
    """In blocks of any size, by runs of which each does a part."""
    output = tmp_path_factory.mktemp("journal") / "out.jsonl"
    left = data.draw(st.permutations(list(entries.items())))
    while left:
        size = data.draw(st.integers(1, len(left)))
        with Journal(output, HEADER) as journal:
            assert len(journal) == len(entries) - len(left)
            half = data.draw(st.integers(0, size))
            journal.append(left[:half])
            journal.append(left[half:size])
        left = left[size:]
    with Journal(output, HEADER) as journal:
        journal.publish(iter(sorted(entries)))
    written = output.read_bytes().split(b"\n")
    assert [json.loads(line) for line in written[:-1]] == [entries[number] for number in sorted(entries)]
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_a_line_that_is_finished_twice_is_a_bug_and_costs_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1])
    with Journal(output, HEADER) as journal:
        for numbers in ([1], [2, 2]):
            with pytest.raises(AssertionError, match=f"line {numbers[0]} finished twice"):
                journal.append((number, {}) for number in numbers)
        assert len(journal) == 1
        journal.publish([1])
    assert output.read_text(encoding="utf-8") == '{"id":1,"text":"žluť\\n"}\n'


def test_what_a_former_run_left_is_opened_and_nothing_is_begun_before_it_is_known_who_answers(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert left_journal(output, HEADER) is None
    assert not list(tmp_path.iterdir())
    by_whom = HEADER | {"model": "m", "fingerprint": "w"}
    with Journal(output, by_whom | {"created": 7}) as journal:
        journal.append([(1, {"id": 1})])
    raw = journal_path(output).read_bytes()
    for known in (HEADER, HEADER | {"created": 5}, HEADER | {"model": "m"}, by_whom):
        journal = left_journal(output, known)
        assert journal is not None
        with journal:
            assert 1 in journal
            assert journal.created == 7
            journal.check(by_whom)
            with pytest.raises(ConfigError, match="its fingerprint is 'w', this one's is 'v'"):
                journal.check(by_whom | {"fingerprint": "v"})
            with pytest.raises(ConfigError, match="its fingerprint is 'w', this one's is None"):
                journal.check(HEADER | {"model": "m"})
            with pytest.raises(ConfigError, match="journal: another process is running this batch"):
                left_journal(output, HEADER)
    for other, said in (
        ({"seed": 5}, "its seed is 0, this one's is 5"),
        ({"model": "n"}, "its model is 'm'"),
        ({"x": 1}, "its x"),
    ):
        with pytest.raises(ConfigError, match=f"journal belongs to another batch: {said}"):
            left_journal(output, HEADER | other)
    with pytest.raises(ConfigError, match="its seed is 0, this one's is None"):
        left_journal(output, {"journal": 1})
    assert journal_path(output).read_bytes() == raw
    journal_path(output).write_bytes(raw[:5])  # a run was killed in its first line
    assert left_journal(output, HEADER | {"seed": 5}) is None
    assert journal_path(output).read_bytes() == raw[:5]
    journal_path(output).write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="journal is no journal of a batch"):
        left_journal(output, HEADER)


def test_a_directory_that_could_not_be_written_is_told_of_before_an_engine_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, as whom tests may run, may write everything."""
    check_writable(tmp_path / "out.jsonl")
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode & os.W_OK))
    with pytest.raises(ConfigError, match="journal cannot be written; mend that or choose another --output"):
        check_writable(tmp_path / "out.jsonl")


@pytest.mark.parametrize("length", range(1, len('{"journal":1,"seed":0}') + 1))
def test_a_run_that_was_killed_in_its_first_line_has_begun_nothing(tmp_path: Path, length: int) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [])
    whole = journal_path(output).read_bytes()
    journal_path(output).write_bytes(whole[:length])
    fill(output, [1])
    assert journal_path(output).read_bytes().startswith(whole)
    with Journal(output, HEADER) as journal:
        assert 1 in journal
