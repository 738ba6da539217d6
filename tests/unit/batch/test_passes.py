"""Passes over whole files: each is made once, is told of, lets others have their turn, and reads what it must."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jdisagg.batch import strict_json
from jdisagg.batch.__main__ import main
from jdisagg.batch.finished import keep_answers
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.lines import BadLine, Call, read_lines, read_lines_but
from jdisagg.batch.passes import LONGEST_S, Pauses
from jdisagg.batch.results import answer_line, error_line, is_answered, is_answered_as_written
from jdisagg.batch.runner import Batch, run_batch
from jdisagg.batch.sender import Sender
from jdisagg.core.errors import ConfigError
from tests.unit.batch.command_line import arguments, write
from tests.unit.batch.fake_server import serving
from tests.unit.batch.test_lines import LINES

NOWHERE = "http://127.0.0.1:9"  # nobody is there
MANY = 400


def answered(number: int, batch: Batch, status_code: int = 200) -> tuple[int, dict[str, Any]]:
    return number, {"id": f"batch_{batch.id}_{number}", "custom_id": f"line-{number}", "response": {"status_code": status_code}}


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    source = write(tmp_path / "in.jsonl", ['{"prompt": "x"}'] * MANY)
    return Batch(input=source, output=tmp_path / "out.jsonl")


@given(LINES, st.sets(st.integers(1, 5)))
@example(['{"custom_id": "a", "prompt": "x"}'] * 2, {1})
@example(['{"prompt": "x"}', '{"custom_id": "line-1", "prompt": "x"}'], {1})
@example(['{"prompt": "\\ud800"}', '{"custom_id": "line-1", "prompt": "x"}'], {1})
def test_lines_that_are_done_leave_the_others_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], done: set[int]
) -> None:
    """Whatever their names, good or bad: a run that was interrupted writes what an undisturbed one would."""
    path = tmp_path_factory.mktemp("done") / "in.jsonl"
    path.write_text("\n".join(texts), encoding="utf-8")
    left = [line for line in read_lines(path, seed=3) if line.number not in done]
    assert [line for line in read_lines_but(path, done, seed=3) if line is not None] == left


def test_a_line_that_is_done_and_has_a_name_is_not_searched_for_what_cannot_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[object] = []
    flaw = strict_json.flaw

    def counted(value: object) -> str | None:
        searched.append(value)
        return flaw(value)

    monkeypatch.setattr(strict_json, "flaw", counted)
    named = [f'{{"custom_id": "a{number}", "prompt": "x \\u0026 y"}}' for number in range(1, 10)]
    path = write(tmp_path / "in.jsonl", ["no request", *named])
    assert [line for line in read_lines_but(path, range(2, 11), seed=0) if line] == [next(read_lines(path, seed=0))]
    assert {type(value) for value in searched} == {str}


@given(st.text(max_size=20), st.sampled_from([200, 400, 502, 2000]), st.dictionaries(st.text(max_size=9), st.text(max_size=20)))
def test_an_answer_is_told_from_a_failure_without_being_decoded(custom_id: str, status: int, body: dict[str, str]) -> None:
    for name in (custom_id, f'{custom_id},"response":{{"status_code":200,', ',"response":'):
        call = Call(1, name, "/v1/completions", {})
        for text in (body, {**body, "text": "", "response": {"status_code": 200}}):
            line = answer_line(call, status, text, batch_id="b", request_id="r", created=0)
            assert is_answered_as_written(strict_json.encode(line)) == is_answered(line) == (status == 200)
        bad = error_line(BadLine(1, name, f'{name},"response":{{"status_code":200,'), batch_id="b")
        assert not is_answered_as_written(strict_json.encode(bad))
    assert not is_answered_as_written(b"")


def test_a_journal_knows_how_many_of_its_lines_failed(batch: Batch) -> None:
    with Journal(batch.output, batch.header("fake")) as journal:
        journal.append([answered(1, batch), answered(2, batch, 500), (3, error_line(BadLine(3, None, "?"), batch_id="b"))])
        assert journal.num_failed == 2
    with Journal(batch.output, batch.header("fake")) as journal:
        assert journal.num_failed == 2
        journal.append([answered(4, batch, 404), answered(5, batch)])
        assert journal.num_failed == 3


class Rests:
    """Counts the pauses of passes; at the one that is `the_last` the task is cancelled."""

    def __init__(self, the_last: int | None = None) -> None:
        self.num = 0
        self._last = the_last

    async def sleep(self, delay_s: float) -> None:
        self.num += 1
        if self.num == self._last:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(delay_s)


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rests], None]:
    """Passes pause behind every line."""

    def pause(rests: Rests) -> None:
        monkeypatch.setattr("jdisagg.batch.passes.LONGEST_S", 0.0)
        monkeypatch.setattr("jdisagg.batch.passes.asyncio", rests)

    return pause


def run_what_is_left(batch: Batch) -> None:
    """Of a batch of which but the first line is answered, and that is no request."""
    lines = batch.input.read_text().splitlines()
    write(batch.input, ["no request", *lines[1:]])

    async def body() -> None:
        async with httpx.AsyncClient(base_url=NOWHERE) as client:
            await run_batch(batch, journal, Sender(client, patience_s=0.0), lambda *_: None)

    with Journal(batch.output, batch.header("fake")) as journal:
        journal.append(answered(number, batch) for number in range(2, MANY + 1))
        asyncio.run(body())


def test_others_have_their_turn_within_each_pass_of_a_run(batch: Batch, pausing: Callable[[Rests], None]) -> None:
    """That for the names which others may have, that over lines that are done, and the comparison at the end."""
    pausing(rests := Rests())
    run_what_is_left(batch)
    assert rests.num == 3 * MANY
    assert batch.output.exists()


@pytest.mark.parametrize("the_last", [10, MANY + 10, 2 * MANY + 10])
def test_a_run_that_shall_end_reads_no_further(batch: Batch, pausing: Callable[[Rests], None], the_last: int) -> None:
    pausing(rests := Rests(the_last))
    with pytest.raises(asyncio.CancelledError):
        run_what_is_left(batch)
    assert rests.num == the_last
    assert not batch.output.exists()
    with Journal(batch.output, batch.header("fake")) as journal:
        assert len(journal) == MANY - (the_last < MANY)


def test_others_have_their_turn_while_answers_are_kept(batch: Batch, pausing: Callable[[Rests], None]) -> None:
    pausing(rests := Rests())
    write(batch.output, [json.dumps(answered(number, batch)[1]) for number in range(1, MANY + 1)])
    with Journal(batch.output, batch.header("fake")) as journal:
        asyncio.run(keep_answers(batch, journal))
        assert rests.num == len(journal) == MANY


def test_a_pass_makes_a_pause_when_it_has_gone_on_for_long_and_not_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, turns = 100.0, 0
    monkeypatch.setattr("jdisagg.batch.passes.monotonic", lambda: now_s)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def body() -> None:
        nonlocal now_s
        pauses, beside = Pauses(), asyncio.ensure_future(others())
        for wanted in (0, 1, 2):
            for _ in range(9):
                await pauses.rest()
                assert turns == wanted
                now_s += LONGEST_S / 10
            now_s += LONGEST_S / 5
        beside.cancel()

    asyncio.run(body())


def test_a_finished_output_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is this batch's, who answered, what may be asked again, and what is told of it."""
    source = write(tmp_path / "in.jsonl", ['{"prompt": "x"}'] * 20 + ['{"prompt": "y", "max_tokens": -1}', "bad"])
    output = tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
    written, decoded = set(output.read_bytes().splitlines()), Counter[bytes]()
    decode = strict_json.decode

    def counted(raw: bytes) -> Any:
        decoded[raw.rstrip(b"\n")] += 1
        return decode(raw)

    monkeypatch.setattr(strict_json, "decode", counted)
    for more in ([], ["--retry-failed"]):
        decoded.clear()
        assert main(arguments(source, output, NOWHERE, "--patience-s", "0", *more)) == len(more)
        who_answered = 1 - len(more)  # is told by the first line
        assert sorted(decoded[line] for line in written) == [1] * (len(written) - 1) + [1 + who_answered]


def test_a_journal_is_not_decoded_and_an_input_parsed_once(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(batch.output, batch.header("fake")) as journal:
        journal.append(answered(number, batch) for number in range(1, MANY))
    decoded = Counter[bytes]()
    decode = strict_json.decode

    def counted(raw: bytes) -> Any:
        decoded[raw.partition(b":")[0]] += 1
        return decode(raw)

    monkeypatch.setattr(strict_json, "decode", counted)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with serving() as server:
        assert main([arg for arg in arguments(batch.input, batch.output, server.url) if arg != "--quiet"]) == 0
        assert server.asked.total() == 1
    assert decoded[b'{"prompt"'] == MANY
    assert decoded[b'{"id"'] == MANY + 1, "the output is, at the end, and the one answer"


def test_a_pass_over_a_large_file_is_told_of(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jdisagg.batch")

    def told(*more: str) -> list[str]:
        caplog.clear()
        with serving() as server:
            assert main(arguments(batch.input, batch.output, server.url, *more)) == 0
        return [record.getMessage() for record in caplog.records if record.name == "jdisagg.batch.passes"]

    with Journal(batch.output, batch.header("fake")) as journal:
        journal.append([answered(1, batch, 500)])
    source, left, output = batch.input, journal_path(batch.output), batch.output
    monkeypatch.setattr("jdisagg.batch.passes.LONG_BYTES", 0)
    assert told() == [
        f"reading {source} (0.0 GB): which batch it is",
        f"reading {left} (0.0 GB): what was answered before",
        f"reading {source} (0.0 GB): what is not answered yet",
        f"reading {source} (0.0 GB): whether it is as it was",
        f"reading {left} (0.0 GB): the output is written",
        f"reading {output} (0.0 GB): how many lines have answers",
    ]
    again = [
        f"reading {source} (0.0 GB): which batch it is",
        f"reading {output} (0.0 GB): whether it is this batch's, and complete",
    ]
    assert told() == again
    assert told("--retry-failed")[:3] == [*again, f"reading {output} (0.0 GB): which answers are kept"]
    monkeypatch.undo()
    assert not told()


def test_an_input_that_cannot_be_read_to_its_end_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a network file system is away, or a disk is damaged: nobody has memory at address 0."""
    source = Path("/proc/self/mem")
    assert main(arguments(source, tmp_path / "out.jsonl", NOWHERE)) == 2
    said = capsys.readouterr().err
    assert "--input: /proc/self/mem cannot be read: Input/output error; mend that and run the same command again" in said
    with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
        list(read_lines(source, seed=0))
