"""Output lines: what they keep of an answer, and what is read from them again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdisagg.batch.finished import answered_by, keep_answers
from jdisagg.batch.journal import Journal
from jdisagg.batch.lines import BadLine, Call
from jdisagg.batch.results import answer_line, bad_answer_line, error_line, is_output_line, stays
from jdisagg.batch.runner import Batch
from jdisagg.batch.sender import Served
from jdisagg.batch.summary import summary

CALL = Call(3, "a", "/v1/completions", {"prompt": "x"})
ANSWERED = {"id": "batch_b_1", "response": {"status_code": 200, "body": {}}, "error": None}
LATE = {"id": "batch_b_1", "response": {"status_code": 504, "body": {}}, "error": None}
NO_REQUEST = error_line(BadLine(1, None, "line 1 is not JSON"), batch_id="b")
NO_ANSWER = bad_answer_line(CALL, "the server answered no JSON object", batch_id="b")


def written(directory: Path, lines: Sequence[object]) -> Path:
    path = directory / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def answer(number: int, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": number}}
    return {"id": f"cmpl-{number}", "created": number, "choices": [{"text": "y"}], "usage": usage, **more}


def test_two_answers_to_one_request_are_one_line() -> None:
    first, second = (answer_line(CALL, 200, answer(number), batch_id="b", request_id="r", created=9) for number in (5, 6))
    assert first == second
    body = {"id": "cmpl-3", "created": 9, "choices": [{"text": "y"}], "usage": {"prompt_tokens": 1}}
    response = {"status_code": 200, "request_id": "r", "body": body}
    assert first == {"id": "batch_b_3", "custom_id": "a", "response": response, "error": None}


def test_two_answers_with_tool_calls_are_one_line_whose_calls_have_ids_of_their_own() -> None:
    def chosen(index: int) -> dict[str, Any]:
        calls = [{"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": "f"}} for _ in range(2)]
        return {"index": index, "message": {"role": "assistant", "content": None, "tool_calls": calls}}

    first, second = (
        answer_line(CALL, 200, {"choices": [chosen(index) for index in range(2)]}, batch_id="b", request_id="r", created=9)
        for _ in range(2)
    )
    assert first == second
    choices = first["response"]["body"]["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert ids == ["call_3_0_0", "call_3_0_1", "call_3_1_0", "call_3_1_1"]
    assert choices[1]["message"]["tool_calls"][1] == {"id": ids[-1], "type": "function", "function": {"name": "f"}}
    assert choices[0]["message"]["role"] == "assistant"


ODD_CALLS = [5, "id", {"name": "f"}, None]


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"usage": None}, {"error": {"message": "full"}}, {"choices": "a"}, {"choices": [None, "a", {"message": "a"}]}),
        {"choices": [{"message": {"tool_calls": tool_calls}} for tool_calls in (None, "a", {}, ODD_CALLS)]},
    ],
)
def test_an_answer_of_another_form_stays_as_it_is(body: dict[str, Any]) -> None:
    assert answer_line(CALL, 429, body, batch_id="b", request_id="r", created=9)["response"]["body"] == body


def test_a_line_without_an_answer_has_the_name_of_its_request() -> None:
    error = {"code": "invalid_answer", "message": "no JSON", "line": 3}
    line = bad_answer_line(CALL, "no JSON", batch_id="b")
    assert line == {"id": "batch_b_3", "custom_id": "a", "response": None, "error": error}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (ANSWERED, True),
        (LATE, False),
        (NO_REQUEST, True),
        (NO_ANSWER, False),
        ({"response": None}, False),
        ({"response": None, "error": "late"}, False),
    ],
)
def test_what_another_try_cannot_change_is_not_asked_again(tmp_path: Path, line: dict[str, Any], kept: bool) -> None:
    assert stays(line) == kept
    found = summary(written(tmp_path, [ANSWERED, {"id": "batch_b_1"} | line, 5]))
    assert found.has_lines_to_retry != kept
    assert found.num_failed == (line is not ANSWERED)


@pytest.mark.parametrize("value", [None, [], "response", {}, {"response": 5}, {"response": {}}])
def test_what_no_batch_wrote_is_no_output_line(value: object) -> None:
    assert not is_output_line(value)


def test_whoever_answered_is_read_from_the_first_line_that_tells(tmp_path: Path) -> None:
    def by(**named: object) -> dict[str, Any]:
        return answer_line(CALL, 200, answer(1, **named), batch_id="b", request_id="r", created=9)

    assert answered_by(written(tmp_path, [5, NO_REQUEST, LATE, by(), by(model=5)])) is None
    told = by(model="m", system_fingerprint="w")
    assert answered_by(written(tmp_path, [5, NO_REQUEST, by(), told, by(model="n")])) == Served("m", "w")
    assert answered_by(written(tmp_path, [by(model="m", system_fingerprint=5)])) == Served("m", None)


@given(st.lists(st.sampled_from(["answered", "late", "not ours"]), max_size=12), st.sets(st.integers(1, 12)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_answer_of_a_finished_output_is_kept_once_however_many_there_are(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, ended: list[str], known: set[int]
) -> None:
    """Also those behind which the output has been cut."""
    monkeypatch.setattr("jdisagg.batch.finished._LINES_AT_ONCE", 3)
    directory = tmp_path_factory.mktemp("kept")
    batch = Batch(input=directory / "in.jsonl", output=directory / "out.jsonl")
    batch.input.write_text('{"prompt": "x"}\n' * 12, encoding="utf-8")
    lines = [
        {
            "id": f"batch_{'other' if how == 'not ours' else batch.id}_{number}",
            "response": {"status_code": 504 if how == "late" else 200},
        }
        for number, how in enumerate(ended, start=1)
    ]
    written(directory, lines)
    with Journal(batch.output, batch.header("m")) as journal:
        journal.append((number, {"known": number}) for number in sorted(known))
        asyncio.run(keep_answers(batch, journal))
        answered = {number for number, how in enumerate(ended, start=1) if how == "answered"}
        assert {number for number in range(1, 13) if number in journal} == answered | known
        missing = [number for number in range(1, 13) if number not in journal]
        journal.append((number, {"new": number}) for number in missing)
        journal.publish(range(1, 13))
    whole = [json.loads(line) for line in batch.output.read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate(whole, start=1):
        new = {"known": number} if number in known else {"new": number}
        assert line == (lines[number - 1] if number in answered - known else new)
