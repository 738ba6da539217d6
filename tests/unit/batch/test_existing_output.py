"""A batch that has an output already: gone on with if batch, model and engine are the same, else refused and left as it is."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest

from jdisagg.batch.__main__ import main
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.runner import Batch
from jdisagg.batch.sender import Sender, Served, served_model
from jdisagg.core.errors import Unavailable
from jdisagg.core.settings import load_config
from tests.unit.batch.command_line import arguments, write
from tests.unit.batch.fake_server import serving


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
