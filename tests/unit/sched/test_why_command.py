"""`jdisagg.replay --why` at the command line: which requests and logs it finds, and what it says of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jdisagg.replay import main
from jdisagg.sched.log_codec import encode
from tests.unit.sched.engine_fake import FakeEngine, request


def test_an_unknown_request_gets_the_nearest_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(request("cmpl-17/0", (1, 2), 2), request("cmpl-18/0", (1, 2), 2), request("other", (1,), 1))
    engine.run()
    engine.scheduler.close_log()
    assert main([str(path), "--why", "cmpl-19/0"]) == 2
    error = capsys.readouterr().err
    assert "no request 'cmpl-19/0' among the 3 of the log; the nearest: " in error
    assert "cmpl-17/0" in error
    assert "cmpl-18/0" in error
    assert main([str(path), "--why", "cmpl-18/0"]) == 0
    assert capsys.readouterr().out.startswith("request cmpl-18/0: 2 prompt tokens")


def test_the_id_a_client_was_given_tells_all_choices_and_no_other_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(*(request(name, (1, 2), 2) for name in ("cmpl-17/0", "cmpl-17/1", "cmpl-171/0", "cmpl-17/1#4")))
    engine.run()
    engine.scheduler.close_log()
    assert main([str(path), "--why", "cmpl-17"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("request ")]
    assert [line.split(":")[0] for line in told] == ["request cmpl-17/0", "request cmpl-17/1", "request cmpl-17/1#4"]
    assert main([str(path), "--why", "cmpl-17/1"]) == 0
    assert capsys.readouterr().out.count("request cmpl-17/1") == 2


def test_a_log_of_a_fleet_is_found_by_its_workers_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.decode-0").write_text("")
    assert main([str(tmp_path / "log")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'log'}: no such file; there are log.decode-0\n"
    assert main([str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'other'}: no such file\n"


def test_a_damaged_log_is_told_up_to_the_line_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    engine = FakeEngine(schedule_log=str(path))
    engine.add(request("a", (1, 2), 6))
    engine.run()
    engine.scheduler.close_log()
    lines = path.read_text().splitlines(keepends=True)

    def damaged(text: str) -> tuple[int, str, str]:
        path.write_text(text)
        status = main([str(path), "--why", "a"])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    status, out, error = damaged("".join(lines[:6]) + lines[6][:-9])
    assert (status, "line 7: cut off before its end" in error) == (0, True)
    assert "where the log ends; queue 0 ms" in out
    broken = {
        "not JSON": "{nonsense}\n",
        "'explode' is no call": '{"call":"explode","args":[],"kwargs":{}}\n',
        "'__class__' is no call": '{"call":"__class__","args":[],"kwargs":{}}\n',
        "KeyError": '{"call":"schedule"}\n',
        "unknown type 'Unheard'": '{"call":"commit","args":[{"$":"Unheard"},0.0],"kwargs":{}}\n',
        "'unheard' is not a valid FinishReason": (
            '{"call":"commit","args":[{"$":"FinishReason","value":"unheard"},0.0],"kwargs":{}}\n'
        ),
        "schedule without a time": '{"call":"schedule","args":[],"kwargs":{}}\n',
        "at_s is 'soon'": '{"call":"drain","args":[],"kwargs":{},"at_s":"soon"}\n',
        "TypeError": "[1,2]\n",
    }
    for said, line in broken.items():
        status, out, error = damaged("".join([*lines[:6], line, *lines[6:]]))
        assert status == 2, said
        assert "line 7: " in error
        assert said in error
        assert "6 calls" not in out
        assert out.startswith("request a: ")
    status, _, error = damaged(json.dumps({"call": "__init__", "args": [encode(engine.config)], "kwargs": {"role": 3}}) + "\n")
    assert (status, "line 1: no scheduler can be made of it" in error) == (2, True)
    status, _, error = damaged("")
    assert (status, "line 1: not a schedule log" in error) == (2, True)
