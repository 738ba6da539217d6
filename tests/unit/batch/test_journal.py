"""The journal keeps whole lines and nothing else, whatever a crash left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.batch.journal import Journal, journal_path
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
        journal.publish([1, 2, 3])
    assert output.read_text(encoding="utf-8") == "".join(f'{{"id":{n},"text":"žluť\\n"}}\n' for n in (1, 2, 3))
    assert not journal_path(output).exists()


def test_a_damaged_line_and_all_after_it_are_done_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    fill(output, [1, 2, 3])
    raw = journal_path(output).read_bytes()
    journal_path(output).write_bytes(raw.replace(b'"id":2', b'"id":7'))
    with Journal(output, HEADER) as journal:
        assert len(journal) == 1
        assert 1 in journal


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
    with pytest.raises(ConfigError, match="its seed is 0, this one's is 5"):
        Journal(output, HEADER | {"seed": 5})
    with Journal(output, HEADER), pytest.raises(ConfigError, match="another process"):
        Journal(output, HEADER)
