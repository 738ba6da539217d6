"""A batch as its user sees it: a process, a server on a socket, files."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.lines import Call
from jdisagg.batch.runner import Batch
from jdisagg.batch.sender import Answer, Sender, Served, served_model
from jdisagg.core.errors import Unavailable
from jdisagg.core.settings import load_config
from tests.unit.batch.fake_server import serving

LINES = [
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "one", "max_tokens": 2}}',
    '{"prompt": "two"}',
    "",
    '{"token_ids": [1, 2, 3], "seed": 77}',
    '{"prompt": "five", "token_ids": [5]}',
    "not json",
    '{"messages": [{"role": "user", "content": "seven"}], "custom_id": "g"}',
    '{"custom_id": "h", "method": "GET", "url": "/v1/completions", "body": {}}',
    '{"custom_id": "i", "method": "POST", "url": "/v1/embeddings", "body": {}}',
    '{"prompt": "ten", "max_tokens": -1}',
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def arguments(source: Path, output: Path, url: str, *more: str) -> list[str]:
    return ["--input", str(source), "--output", str(output), "--server", url, "--quiet", *more]


def test_answers_come_in_input_order_with_bad_lines_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url, "--seed", "1000")) == 0
        assert capsys.readouterr().err == "jdisagg.batch: 4 ok, 5 failed\n"
        assert main(arguments(source, output, server.url, "--seed", "1000")) == 0
        said = (
            "jdisagg.batch: already complete by model 'fake', nothing was run; --retry-failed asks again for what failed\n"
            "jdisagg.batch: 4 ok, 5 failed\n"
        )
        assert capsys.readouterr().err == said
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    batch_id = Batch(input=source, output=output, seed=1000).id
    assert re.fullmatch("[0-9a-f]{8}", batch_id)
    assert [answer["id"] for answer in answers] == [f"batch_{batch_id}_{number}" for number in (1, 2, 4, 5, 6, 7, 8, 9, 10)]
    assert server.named == {answer["id"] for answer in answers if answer["response"]}  # found again in the server's logs
    assert [answer["custom_id"] for answer in answers] == ["a", "line-2", "line-4", None, None, "g", "h", "i", "line-10"]
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


ANSWERED = {"a", "line-2", "line-4", "g"}


def test_the_second_line_of_one_custom_id_is_refused_naming_both(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "one", "custom_id": "a"}',
        '{"prompt": "two", "custom_id": "b"}',
        "",
        '{"prompt": "four", "custom_id": "a"}',
        '{"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {}}',
        '{"prompt": "six", "custom_id": "line-7"}',
        '{"prompt": "seven"}',
        '{"prompt": "eight", "custom_id": "a"}',
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 3
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", None, None, "line-7", None, None]
    assert [answer["error"]["message"] for answer in answers if answer["error"]] == [
        "line 4: custom_id 'a' is that of line 1; give each line its own",
        "line 5: custom_id 'b' is that of line 2; give each line its own",
        "line 7: custom_id 'line-7' is that of line 6; give each line its own",
        "line 8: custom_id 'a' is that of line 1; give each line its own",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "5"], "its seed is 0, this one's is 5"),
        (["--served-model-name", "other"], "its model is 'demo', this one's is 'other'"),
        (["--dtype", "bfloat16"], "its --dtype is 'auto', this one's is 'bfloat16'"),
        (["--numerics", "exact"], "its --numerics is 'fast', this one's is 'exact'"),
        (["--max-model-len", "64"], "its --max-model-len is None, this one's is 64"),
    ],
)
def test_another_batch_is_refused_before_an_engine_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    def load(*_: object) -> None:
        raise Unavailable("an engine is being loaded")

    monkeypatch.setattr("jdisagg.batch.__main__.keep_freed_memory", load)  # the first step of it
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}']), tmp_path / "out.jsonl"
    command = ["--input", str(source), "--output", str(output), "--model", "demo", "--quiet"]
    header = Batch(input=source, output=output, config=load_config(["--role", "unified"])).header("demo")
    with Journal(output, header):
        assert main(command) == 2
        assert "another process is running this batch" in capsys.readouterr().err
    written = journal_path(output).read_bytes()
    assert main([*command, *flags]) == 2
    assert said in capsys.readouterr().err
    assert journal_path(output).read_bytes() == written
    assert main(command) == 1
    assert "an engine is being loaded" in capsys.readouterr().err


def test_concurrency_is_bounded_and_used(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [f'{{"prompt": "p{i}"}}' for i in range(40)])
    with serving(delay_s=0.05, together=5) as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url, "--max-concurrency", "5")) == 0
        assert server.most_at_once == 5


def test_no_more_of_a_batch_is_under_way_than_it_has_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a --max-concurrency: a task for each of a thousand million is no memory that anybody has."""
    tasks: list[int] = []
    send = Sender.send

    async def counted(self: Sender, call: Call, request_id: str) -> Answer:
        tasks.append(len(asyncio.all_tasks()))
        return await send(self, call, request_id)

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


def test_a_finished_batch_is_not_run_again_and_another_output_is_not_overwritten(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}', "bad"]), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        first = output.read_bytes()
        assert main(arguments(source, output, server.url)) == 0
        assert output.read_bytes() == first
        assert server.asked.total() == 1
        write(source, ['{"prompt": "x"}'])
        assert main(arguments(source, output, server.url)) == 2
        assert output.read_bytes() == first


@pytest.mark.parametrize("other", [{"model": "b"}, {"weights": "fedcba9876543210cc"}])
def test_what_another_model_or_other_weights_answered_is_never_taken_for_this_one_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, str]
) -> None:
    """Neither a finished output nor the beginning of one."""
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}', '{"prompt": "y"}']), tmp_path / "out.jsonl"
    ours = {"model": "a", "weights": "0123456789abcdefcc"}
    with serving(**ours) as server:
        assert main(arguments(source, output, server.url)) == 0
        first = output.read_bytes()
    with serving(**ours) as server:
        assert main(arguments(source, output, server.url)) == 0
        assert "already complete by model 'a' with weights 0123456789abcdef, nothing was run" in capsys.readouterr().err
    with serving(**(ours | other)) as server:
        assert main(arguments(source, output, server.url)) == 2
        said = capsys.readouterr().err
        assert "holds answers of model 'a' with weights 0123456789abcdef, this server has model" in said
        assert output.read_bytes() == first
        line = json.loads(first.splitlines()[0])
        output.unlink()
        batch = Batch(input=source, output=output)
        with Journal(output, batch.header("a", ours["weights"])) as journal:
            journal.append([(1, line)])
        assert main(arguments(source, output, server.url)) == 2
        assert "belongs to another batch: its" in capsys.readouterr().err
        assert not server.asked
    with serving(**ours) as server:
        assert main(arguments(source, output, server.url)) == 0
        assert server.asked.total() == 1
    assert output.read_bytes() == first
    assert main(arguments(source, output, server.url)) == 0, "where nobody is, nobody is another one"


def test_a_server_of_several_models_is_none_that_another_answered_as() -> None:
    two = Served("base", "f", ("tuned",))
    assert two.may_have_answered_as(Served("tuned", "g"))
    assert two.may_have_answered_as(Served("base", None))
    assert not two.may_have_answered_as(Served("base", "g"))
    assert not two.may_have_answered_as(Served("third", "f"))


@pytest.mark.parametrize(
    ("models", "wanted"),
    [
        (
            [{"id": "base", "fingerprint": "f"}, {"id": "tuned"}, 5, {}, {"id": "third"}],
            Served("base", "f", ("tuned", "third")),
        ),
        ([{"id": "base", "fingerprint": 5}], Served("base", None)),
    ],
)
def test_what_a_server_says_of_its_models(models: list[object], wanted: Served) -> None:
    async def ask(url: str) -> Served:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            return await served_model(Sender(client, patience_s=60.0))

    with serving(odd={"/v1/models": (200, json.dumps({"data": models}).encode())}) as server:
        assert asyncio.run(ask(server.url)) == wanted


def test_a_resumed_batch_has_one_time_in_all_its_lines(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}', '{"prompt": "y"}']), tmp_path / "out.jsonl"
    os.utime(source, (1000, 1000))
    with serving(delay_s=0.1) as server:
        assert main(arguments(source, output, server.url)) == 0
        whole = output.read_bytes()
        with Journal(output, Batch(input=source, output=output).header("fake")) as journal:
            journal.append([(1, json.loads(whole.splitlines()[0]))])
        output.unlink()
        os.utime(source, (2000, 2000))
        assert main(arguments(source, output, server.url)) == 0
    assert output.read_bytes() == whole
    assert b'"created":1000' in whole


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        ("y", []),
        ("x", ["--seed", "1"]),
        ("x", ["--model", "demo"]),
    ],
)
def test_a_finished_output_of_as_many_lines_of_another_batch_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, flags: list[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}']), tmp_path / "out.jsonl"
    with serving() as server:
        assert main(arguments(source, output, server.url)) == 0
        first = output.read_bytes()
        write(source, [f'{{"prompt": "{prompt}"}}'])
        command = ["--input", str(source), "--output", str(output), "--quiet", *flags]
        assert main(command if "--model" in flags else [*command, "--server", server.url]) == 2
        assert "exists and is not the output of this batch" in capsys.readouterr().err
        assert output.read_bytes() == first
        assert server.asked.total() == 1


@pytest.mark.parametrize("flags", [["--numerics", "exact"], ["--dtype", "bfloat16"], ["--served-model-name", "other"]])
def test_a_finished_output_of_another_engine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", ['{"prompt": "x"}']), tmp_path / "out.jsonl"
    batch = Batch(input=source, output=output, config=load_config(["--role", "unified"]))
    output.write_text(json.dumps({"id": f"batch_{batch.id}_1", "response": {"status_code": 200}}) + "\n")
    command = ["--input", str(source), "--output", str(output), "--quiet"]
    assert main(command) == 0
    assert main([*command, "--disagg"]) == 0
    assert "already complete, nothing was run" in capsys.readouterr().err
    assert main([*command, *flags]) == 2
    assert "is not the output of this batch" in capsys.readouterr().err


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
    size = journal.stat().st_size if journal.exists() else 0
    process = subprocess.Popen(command)
    try:
        end_s = time.monotonic() + 60
        while process.poll() is None and not (journal.exists() and journal.stat().st_size > size):
            assert time.monotonic() < end_s, "the batch does not get on"
            time.sleep(0.005)
        return process.wait(timeout=then_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(timeout=30)
    finally:
        process.kill()
        process.wait(timeout=30)
