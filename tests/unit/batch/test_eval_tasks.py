"""Scores of the offline evaluation, on answers that a reader computes by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from eval_tasks.tasks import STRIDE, TASKS, WINDOW, load_examples, until_stop, windows

from jdisagg.models.resolve import resolve_model
from jdisagg.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(resolve_model("demo"))


def scored(token_ids: tuple[int, ...], last: list[float]) -> dict[str, Any]:
    """A prompt's answer whose last tokens have these log-probabilities, those before -9."""
    before = [None, *[-9.0] * (len(token_ids) - 1 - len(last))]
    return {"text": "", "logprobs": {"token_logprobs": before + last}}


def test_choice_sums_the_continuation_alone() -> None:
    example = {"id": "c", "context": "import os\nimport ", "choices": ["sys", "re"], "answer": 1}
    task = TASKS["choice"]
    first, second = task.probes(example, TOKENIZER)
    start = len(TOKENIZER.encode("import os\nimport"))
    assert TOKENIZER.decode(first.token_ids[start:]) == " sys"  # the context's last space is part of the token
    logprobs = {"first": [-0.5] * (len(first.token_ids) - start), "second": [-0.1] * (len(second.token_ids) - start)}
    answers = {
        first.name: scored(first.token_ids, logprobs["first"]),
        second.name: scored(second.token_ids, logprobs["second"]),
    }
    scores = task.score([example], answers, TOKENIZER)
    assert scores["accuracy"] == scores["accuracy_per_byte"] == 1.0
    assert scores["right_logprob_nats"] == pytest.approx(sum(logprobs["second"]))
    assert task.score([example | {"answer": 0}], answers, TOKENIZER)["accuracy"] == 0.0


def test_generate_counts_exact_and_containing_answers() -> None:
    examples = [
        {"id": "1", "prompt": "a", "expected": "x = 1"},
        {"id": "2", "prompt": "a", "expected": "x"},
        {"id": "3", "prompt": "a", "contains": "z"},
    ]
    answers = {"1": {"text": " x = 1\n"}, "2": {"text": "x + y"}, "3": {"text": "y"}}
    scores = TASKS["generate"].score(examples, answers, TOKENIZER)
    assert scores == {"exact_match": pytest.approx(1 / 3), "contains": pytest.approx(2 / 3)}


def test_generate_leaves_spaces_aside_on_both_sides_and_counts_nothing_that_nobody_expects() -> None:
    examples = [{"id": "1", "prompt": "a", "expected": " x = 1"}, {"id": "2", "prompt": "a"}]
    answers = {"1": {"text": " x = 1\n"}, "2": {"text": "y"}}
    assert TASKS["generate"].score(examples, answers, TOKENIZER) == {"exact_match": 0.5, "contains": 0.5}


@pytest.mark.parametrize(("stops", "shown"), [((), "x abc y"), (("abc", "b"), "x a"), (("y", " a"), "x"), (("z",), "x abc y")])
def test_a_reference_is_cut_where_a_server_stops(stops: tuple[str, ...], shown: str) -> None:
    assert until_stop("x abc y", stops) == shown


def test_perplexity_counts_every_token_once_and_divides_by_bytes() -> None:
    example = {"id": "p", "text": "x = 1\n" * 700}
    task = TASKS["perplexity"]
    ids = TOKENIZER.encode(example["text"])
    probes = task.probes(example, TOKENIZER)
    assert len(probes) > 2
    answers = {probe.name: scored(probe.token_ids, [-0.25] * (len(probe.token_ids) - 1)) for probe in probes}
    scores = task.score([example], answers, TOKENIZER)
    assert scores["nats_per_token"] == pytest.approx(0.25)
    assert scores["bits_per_byte"] == pytest.approx(0.25 * (len(ids) - 1) / math.log(2) / len(example["text"]))


@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
def test_windows_give_every_counted_token_its_context(length: int) -> None:
    parts = windows(tuple(range(length)))
    assert [token for ids, count in parts for token in ids[len(ids) - count :]] == list(range(1, length))
    assert all(len(ids) <= WINDOW for ids, _ in parts)
    assert all(len(ids) - count >= WINDOW - STRIDE for ids, count in parts[1:])


def test_a_task_line_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "a"}\n\n{"prompt": "b"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"task\.jsonl:3: a perplexity example needs text"):
        load_examples(path, "perplexity")


def test_ids_are_text_whatever_the_task_file_has(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "a"}\n{"id": 7, "prompt": "b"}\n', "utf-8")
    examples = load_examples(path, "generate")
    assert [probe.line()["custom_id"] for each in examples for probe in TASKS["generate"].probes(each, TOKENIZER)] == ["1", "7"]
