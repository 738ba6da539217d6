"""A batch as its user sees it: a process, a server on a socket, files."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import journal_path
from jdisagg.batch.lines import Call
from jdisagg.batch.runner import Batch
from jdisagg.batch.sender import Answer, Sender
from tests.unit.batch.command_line import LINES, arguments, write
from tests.unit.batch.fake_server import serving

ANSWERED = {"a", "line-2", "line-4", "g"}


def test_answers_come_in_input_order_with_bad_lines_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url, "--seed", "1000")) == 0
        told = (
            "jdisagg.batch: failed: line 5: wanted exactly one of prompt, token_ids, messages (or url and body), "
            "got prompt, token_ids\n"
            "jdisagg.batch: failed: line 6 is not JSON: Expecting value at character 1\n"
            "jdisagg.batch: failed: line 8 ('h'): method must be POST, got 'GET'\n"
            f'jdisagg.batch: failed: 2 more; in {output} their "response" is null or has another status_code than 200\n'
            "jdisagg.batch: 4 ok, 5 failed\n"
        )
        assert capsys.readouterr().err == told
        assert main(arguments(source, output, server.url, "--seed", "1000")) == 0
        said = "jdisagg.batch: already complete by model 'fake', nothing was run; --retry-failed asks again for what failed\n"
        assert capsys.readouterr().err == said + told
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    batch_id = Batch(input=source, output=output, seed=1000).id
    assert re.fullmatch("[0-9a-f]{8}", batch_id)
    assert [answer["id"] for answer in answers] == [f"batch_{batch_id}_{number}" for number in (1, 2, 4, 5, 6, 7, 8, 9, 10)]
    assert server.named == {answer["id"] for answer in answers if answer["response"]}  # found again in the server's logs
    assert [answer["custom_id"] for answer in answers] == [
        "a",
        "line-2",
        "line-4",
        "line-5",
        "line-6",
        "g",
        "h",
        "i",
        "line-10",
    ]
    assert [answer["error"] and answer["error"]["line"] for answer in answers] == [None, None, None, 5, 6, None, 8, 9, None]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers if answer["custom_id"] in ANSWERED]
    assert texts == [
        "one with seed 1001 on /v1/completions \N{SNOWMAN}",
        "two with seed 1002 on /v1/completions \N{SNOWMAN}",
        "[1, 2, 3] with seed 77 on /v1/completions \N{SNOWMAN}",
        "[{'role': 'user', 'content': 'seven'}] with seed 1007 on /v1/chat/completions \N{SNOWMAN}",
    ]
    assert answers[-1]["response"]["status_code"] == 400
    assert "max_tokens" in answers[-1]["response"]["body"]["error"]["message"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_the_second_line_of_one_custom_id_is_refused_naming_both(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "one", "custom_id": "a"}',
        '{"prompt": "two", "custom_id": "b"}',
        "",
        '{"prompt": "four", "custom_id": "a"}',
        '{"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {}}',
        '{"prompt": "six", "custom_id": "a"}',
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 2
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "line-4", "line-5", "line-6"]
    assert [answer["error"]["message"] for answer in answers if answer["error"]] == [
        "line 4: custom_id 'a' is that of line 1; give each line its own",
        "line 5: custom_id 'b' is that of line 2; give each line its own",
        "line 6: custom_id 'a' is that of line 1; give each line its own",
    ]


def test_a_line_that_is_called_after_its_number_is_told_from_one_that_has_that_name(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "one"}',
        '{"prompt": "two", "custom_id": "line-1"}',
        '{"prompt": "three", "custom_id": "line-4"}',
        '{"prompt": "four"}',
        '{"prompt": "five"}',
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 3
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["line-1", "line-2", "line-4", None, "line-5"]
    assert [answer["error"]["message"] for answer in answers if answer["error"]] == [
        "line 2: custom_id 'line-1' is that of line 1; give each line its own",
        "line 4: custom_id 'line-4' is that of line 3; give each line its own",
    ]


def test_concurrency_is_bounded_and_used(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [f'{{"prompt": "p{i}"}}' for i in range(40)])
    with serving(delay_s=0.05, together=5) as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url, "--max-concurrency", "5")) == 0
        assert server.most_at_once == 5


def test_no_more_of_a_batch_is_under_way_than_it_has_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a --max-concurrency: a task for each of a thousand million is no memory that anybody has."""
    tasks: list[int] = []
    send = Sender.send

    async def counted(self: Sender, call: Call, request_id: str, set_aside: Callable[[], object]) -> Answer:
        tasks.append(len(asyncio.all_tasks()))
        return await send(self, call, request_id, set_aside)

    monkeypatch.setattr(Sender, "send", counted)
    source = write(tmp_path / "in.jsonl", ['{"prompt": "one"}', "", '{"prompt": "two"}'])
    with serving() as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url, "--max-concurrency", "2000")) == 0
    assert max(tasks) < 10


def test_a_busy_server_is_asked_again_and_a_dead_one_stops_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}', '{"prompt": "y"}']), tmp_path / "out.jsonl"
    with serving(refusals=2) as server:
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 4
    output.unlink()
    assert main(arguments(source, output, server.url, "--patience-s", "0.3")) == 1
    assert "run the same command again" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.timeout(600)
def test_kill_at_any_moment_then_the_output_of_an_undisturbed_run(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "prompt {i}", "max_tokens": {i % 7 + 1}}}' for i in range(150)]
    lines[60] = "broken"
    source = write(tmp_path / "in.jsonl", lines)
    calm, stormy = tmp_path / "calm.jsonl", tmp_path / "stormy.jsonl"
    rng = random.Random(0)
    with serving() as server:
        assert main(arguments(source, calm, server.url)) == 0
    with serving(delay_s=0.04) as server:
        command = [sys.executable, "-m", "jdisagg.batch", *arguments(source, stormy, server.url, "--max-concurrency", "4")]
        outcomes = [run_a_while(command, stormy, rng.uniform(0.0, 0.4))]
        while outcomes[-1] == -signal.SIGKILL and len(outcomes) < 40:
            outcomes.append(run_a_while(command, stormy, rng.uniform(0.0, 0.4)))
        kills = len(outcomes) - 1
        assert outcomes[-1] == 0
        assert kills >= 3
        assert stormy.read_bytes() == calm.read_bytes()
        assert len(server.asked) == 149
        lost = 4 + 4 + 5  # on their way, waiting for the disk, being written: all that a kill costs, on the slowest disk
        assert server.asked.total() <= 149 + lost * kills
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm.jsonl", "in.jsonl", "stormy.jsonl"]


def run_a_while(command: list[str], output: Path, then_s: float) -> int:
    """Start, wait until it has added to its journal, let it go on for `then_s`, kill it; returns the exit status."""
    journal = journal_path(output)
    size = size_of(journal)
    process = subprocess.Popen(command)
    try:
        end_s = time.monotonic() + 120
        while process.poll() is None and size_of(journal) <= size:
            assert time.monotonic() < end_s, "the batch does not get on"
            time.sleep(0.005)
        return process.wait(timeout=then_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(timeout=30)
    finally:
        process.kill()
        process.wait(timeout=30)


def size_of(path: Path) -> int:
    """In bytes; a batch that ends removes its journal."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
