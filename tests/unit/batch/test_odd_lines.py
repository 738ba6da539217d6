"""An odd input line or an odd answer fails alone: the other lines have their answers, and any JSON reader takes the output."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jdisagg.batch.__main__ import main
from jdisagg.batch.strict_json import MAX_DEPTH, decode, encode, flaw
from tests.unit.batch.command_line import arguments
from tests.unit.batch.fake_server import HANGS_UP, SAYS_NOTHING, serving

WHOLE = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # both halves of a pair are one character when they are read
BAD_LINES = {
    "surrogate_in_prompt": ('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "\\ud800"}}', "a"),
    "surrogate_in_bytes": (b'{"custom_id": "a", "prompt": "\xed\xa0\x80"}', "a"),
    "surrogate_in_key": ('{"custom_id": "a", "prompt": "x", "\\udfff": 1}', "a"),
    "surrogate_in_id": ('{"custom_id": "\\ud800", "prompt": "x"}', "line-2"),
    "surrogate_in_id_of_no_request": ('{"custom_id": "\\ud800", "nonsense": 1}', "line-2"),
    "nan": ('{"custom_id": "a", "prompt": "x", "temperature": NaN}', "a"),
    "infinity": ('{"custom_id": "a", "prompt": "x", "temperature": -Infinity}', "a"),
    "beyond_a_float": ('{"custom_id": "a", "prompt": "x", "temperature": 1e999}', "a"),
    "deep": ('{"custom_id": "a", "prompt": ' + "[" * 900 + "]" * 900 + "}", "a"),
    "too_deep_to_read": ('{"prompt": ' + "[" * 90_000 + "]" * 90_000 + "}", "line-2"),
    "huge_integer": ('{"prompt": "x", "max_tokens": ' + "9" * 6000 + "}", "line-2"),
}
ODD_ANSWERS = {
    "no_utf8": b'{"id": "cmpl-1", "text": "\xff"}',
    "surrogate": b'{"id": "cmpl-1", "text": "\\ud800"}',
    "nan": b'{"id": "cmpl-1", "logprob": NaN}',
    "deep": b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "too_deep_to_read": b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "huge_integer": b'{"a": ' + b"9" * 6000 + b"}",
    "empty": b"",
    "no_json": b"<html>",
    "no_object": b"[1]",
}


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} in the output")


def run(
    tmp_path: Path, raw: bytes, odd: dict[str, tuple[int, bytes]], *flags: str, dies_of: str | None = None
) -> list[dict[str, Any]]:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(raw)
    with serving(odd=odd, dies_of=dies_of, delay_s=0.0 if dies_of is None else 0.05) as server:
        assert main(arguments(source, output, server.url, *flags)) == 0
        asked = server.asked.total()
        assert main(arguments(source, output, server.url, *flags)) == 0
        assert server.asked.total() == asked, "it is known as the output of this batch"
    lines = output.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse_constant) for line in lines]


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_sent_is_refused_alone(tmp_path: Path, name: str) -> None:
    bad, custom_id = BAD_LINES[name]
    good = b'{"prompt": "x"}\n'
    before, refused, after = run(tmp_path, good + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n" + good, {})
    assert [line["response"]["status_code"] for line in (before, after)] == [200, 200]
    assert refused["response"] is None
    assert refused["custom_id"] == custom_id
    assert refused["error"]["code"] == "invalid_line"
    assert refused["error"]["message"].startswith("line 2 ")


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_an_answer_that_is_no_json_object_fails_its_line_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    lines = b'{"prompt": "x"}\n{"prompt": "odd", "custom_id": "a"}\n{"prompt": "x"}\n'
    before, failed, after = run(tmp_path, lines, {"odd": (200, ODD_ANSWERS[name])})
    assert [line["response"]["status_code"] for line in (before, after)] == [200, 200]
    assert (failed["response"], failed["custom_id"], failed["error"]["code"]) == (None, "a", "invalid_answer")
    assert "server" in failed["error"]["message"]
    assert capsys.readouterr().err.splitlines()[-1] == "jdisagg.batch: 2 ok, 1 failed"


def prompts(*texts: str) -> bytes:
    return b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize(("odd", "times", "said"), [((HANGS_UP, b""), 5, "disconnected"), ((SAYS_NOTHING, b""), 1, "Timeout")])
def test_a_line_that_the_server_takes_and_never_answers_fails_alone(
    tmp_path: Path, odd: tuple[int, bytes], times: int, said: str
) -> None:
    before, failed, after = run(tmp_path, prompts("x", "poison", "y"), {"poison": odd}, "--request-timeout-s", "1")
    assert [line["response"]["status_code"] for line in (before, after)] == [200, 200]
    assert (failed["response"], failed["custom_id"]) == (None, "line-2")
    assert f"took the request {times} times and answered others only" in failed["error"]["message"]
    assert said in failed["error"]["message"]


def test_a_line_that_brings_the_server_down_takes_no_other_with_it(tmp_path: Path) -> None:
    texts = [f"p{number}" for number in range(60)]
    texts[7] = "poison"
    lines = run(tmp_path, prompts(*texts), {}, dies_of="poison")
    assert [line["custom_id"] for line in lines if line["error"]] == ["line-8"]
    assert sum(line["response"]["status_code"] == 200 for line in lines if line["response"]) == 59


def test_a_failure_without_json_keeps_its_status(tmp_path: Path) -> None:
    (line,) = run(tmp_path, b'{"prompt": "odd"}\n', {"odd": (500, b"\xffoops")})
    assert line["response"]["status_code"] == 500
    assert "oops" in line["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(("given", "kept"), [(b"5", "answer-1"), (b"null", "answer-1"), (b'"chatcmpl-9-8"', "chatcmpl-1")])
def test_the_id_of_an_answer_may_be_anything(tmp_path: Path, given: bytes, kept: str) -> None:
    (line,) = run(tmp_path, b'{"prompt": "odd"}\n', {"odd": (200, b'{"id": ' + given + b"}")})
    assert line["response"]["body"]["id"] == kept


@pytest.mark.parametrize("models", [b"", b"[]", b'{"data": [5]}', b'{"data": [{}]}', b'{"data": [{"id": "\\ud800"}]}'])
def test_a_server_that_names_no_model_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], models: bytes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    with serving(odd={"/v1/models": (200, models)}) as server:
        assert main(arguments(source, tmp_path / "out.jsonl", server.url)) == 2
    assert "--server: /v1/models" in capsys.readouterr().err


def test_a_grpc_port_is_told_of_as_what_it_may_be_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    server = grpc.server(ThreadPoolExecutor(1))
    url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert main(arguments(source, tmp_path / "out.jsonl", url, "--patience-s", "600")) == 2
    server.stop(None).wait()
    assert "illegal request line (no HTTP: a gRPC port?)" in capsys.readouterr().err


def test_nesting_is_allowed_up_to_the_limit() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert flaw(value) is None
    assert flaw({"a": value}) is not None


@given(st.lists(st.text(st.characters(categories=["Cs"]) | st.sampled_from('\\"u d8\n\u2028😀'), max_size=6), max_size=3))
@example(["half \ud800", "\udfff and \\ud800 and \N{SNOWMAN}"])
def test_whatever_is_encoded_is_one_line_that_reads_back(texts: list[str]) -> None:
    odd = {text: text for text in texts if not WHOLE.search(text)}
    raw = encode(odd)
    assert b"\n" not in raw
    assert json.loads(raw) == odd == decode(raw)


def test_a_file_in_utf_16_is_told_of_and_none_of_its_lines_is_guessed(tmp_path: Path) -> None:
    lines = run(tmp_path, '{"prompt": "one"}\r\n{"prompt": "two"}\r\n'.encode("utf-16"), {})
    assert all(line["response"] is None for line in lines)
    assert "byte 1 is not UTF-8; save the file as UTF-8" in lines[0]["error"]["message"]


def test_a_line_is_numbered_once(tmp_path: Path) -> None:
    (line,) = run(tmp_path, b'{"prompt": \n', {})
    assert line["error"]["message"] == "line 1 is not JSON: Expecting value at character 13"
