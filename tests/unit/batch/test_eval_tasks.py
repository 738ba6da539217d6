"""Scores of the offline evaluation, on answers that a reader computes by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import eval_batch
import pytest
import tokenizers
from eval_tasks.tasks import STRIDE, TASKS, WINDOW, load_examples, until_stop, windows

from jdisagg.core.errors import NotFetched
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


@pytest.mark.parametrize(("context", "choices"), [("", ["import os", "if"]), ("i", ["s not", "f"])])
def test_a_choice_whose_first_token_has_no_likelihood_is_refused(context: str, choices: list[str]) -> None:
    """Of a tokenizer that puts no BOS: a choice of that token alone would be certain, and always win."""
    layout = json.loads((resolve_model("demo") / "tokenizer.json").read_text("utf-8"))
    without = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(layout | {"post_processor": None})), {})
    example = {"id": "c", "context": context, "choices": choices, "answer": 0}
    assert len(TASKS["choice"].probes(example, TOKENIZER)) == 2
    with pytest.raises(ValueError, match=r"c: choices\[.\] has the first token of its prompt"):
        TASKS["choice"].probes(example, without)
    assert len(TASKS["choice"].probes(example | {"context": "import os\n" + context}, without)) == 2


def test_generate_counts_exact_and_containing_answers() -> None:
    examples = [
        {"id": "1", "prompt": "a", "expected": "x = 1"},
        {"id": "2", "prompt": "a", "expected": "x"},
        {"id": "3", "prompt": "a", "contains": "z"},
    ]
    answers = {"1": {"text": " x = 1\n"}, "2": {"text": "x + y"}, "3": {"text": "y"}}
    scores = TASKS["generate"].score(examples, answers, TOKENIZER)
    assert scores == {"exact_match": 0.5, "contains": pytest.approx(2 / 3)}, "shares of those that name such a text"


def test_generate_leaves_spaces_aside_on_both_sides_and_counts_nothing_that_nobody_expects() -> None:
    examples = [{"id": "1", "prompt": "a", "expected": " x = 1"}, {"id": "2", "prompt": "a"}]
    answers = {"1": {"text": " x = 1\n"}, "2": {"text": "y"}}
    assert TASKS["generate"].score(examples, answers, TOKENIZER) == {"exact_match": 1.0, "contains": 1.0}
    assert TASKS["generate"].score(examples[1:], answers, TOKENIZER) == {}


@pytest.mark.parametrize(
    ("stop", "sent"), [({"stop": "def"}, ["def"]), ({"stop": ["a", "b"]}, ["a", "b"]), ({"stop": None}, []), ({}, [])]
)
def test_one_stop_string_may_stand_alone_as_in_a_request(tmp_path: Path, stop: dict[str, Any], sent: list[str]) -> None:
    """Not a stop string for each of its letters."""
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps({"prompt": "a", "expected": None, **stop}) + "\n", "utf-8")
    (example,) = load_examples(path, "generate")
    (probe,) = TASKS["generate"].probes(example, TOKENIZER)
    assert probe.line()["body"]["stop"] == sent


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


@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW + 5])
@pytest.mark.parametrize("most", [WINDOW, WINDOW + 1])
def test_windows_give_every_counted_token_its_context(length: int, most: int) -> None:
    parts = windows(tuple(range(length)), most)
    assert [token for ids, count in parts for token in ids[len(ids) - count :]] == list(range(1, length))
    assert all(len(ids) <= most for ids, _ in parts)
    assert all(len(ids) - count >= WINDOW - STRIDE for ids, count in parts[1:])


def test_a_task_line_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "a"}\n\n{"prompt": "b"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"task\.jsonl:3: a perplexity example needs text"):
        load_examples(path, "perplexity")


def test_a_task_line_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "a"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "utf-8")
    with pytest.raises(ValueError, match=r"task\.jsonl:2: .*recursion"):
        load_examples(path, "perplexity")


def test_ids_are_text_whatever_the_task_file_has(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "a"}\n{"id": 7, "prompt": "b"}\n', "utf-8")
    examples = load_examples(path, "generate")
    assert [probe.line()["custom_id"] for each in examples for probe in TASKS["generate"].probes(each, TOKENIZER)] == ["1", "7"]


@pytest.mark.parametrize(
    ("kind", "lines", "wrong"),
    [
        ("choice", [{"context": "a", "choices": ["b", ""], "answer": 0}], r"task\.jsonl:1: .*choices\[1\] is empty"),
        ("choice", [{"context": "a", "choices": [], "answer": 0}], r"task\.jsonl:1: .*answer must be in \[0, 0\); got 0"),
        ("choice", [{"context": "a", "choices": ["b"], "answer": 1}], r"task\.jsonl:1: .*answer must be in \[0, 1\); got 1"),
        ("choice", [{"context": "a", "choices": ["b"], "answer": "A"}], r"task\.jsonl:1: answer must be the index .* got 'A'"),
        ("choice", [{"context": "a", "choices": 5, "answer": 0}], r"task\.jsonl:1: choices must be a list of texts; got 5"),
        ("choice", [{"context": "a", "choices": ["b", 3], "answer": 0}], r"task\.jsonl:1: choices must be a list of texts"),
        ("choice", [{"context": None, "choices": ["b"], "answer": 0}], r"task\.jsonl:1: context must be a text; got None"),
        ("generate", [{"id": 2, "prompt": "a"}, {"prompt": "b"}], r"task\.jsonl:2: .*id '2' is that of line 1"),
        ("generate", [{"prompt": ["a"]}], r"task\.jsonl:1: prompt must be a text; got \['a'\]"),
        ("generate", [{"prompt": "a", "expected": 5}], r"task\.jsonl:1: expected must be a text; got 5"),
        ("generate", [{"prompt": "a", "contains": ["b"]}], r"task\.jsonl:1: contains must be a text"),
        ("generate", [{"prompt": "a", "max_tokens": 0}], r"task\.jsonl:1: max_tokens must be a whole number from 1 on; got 0"),
        ("generate", [{"prompt": "a", "max_tokens": "9"}], r"task\.jsonl:1: max_tokens must be .*; got '9'"),
        ("generate", [{"prompt": "a", "stop": 5}], r"task\.jsonl:1: stop must be a text or a list of texts; got 5"),
        ("generate", [{"prompt": "a", "stop": ["b", 5]}], r"task\.jsonl:1: stop must be a text or a list of texts"),
        ("perplexity", [{"text": 5}], r"task\.jsonl:1: text must be a text; got 5"),
        ("perplexity", [{"text": "\ud800"}], r"task\.jsonl:1: .*surrogate"),
    ],
)
def test_an_example_that_cannot_be_scored_is_named(tmp_path: Path, kind: str, lines: list[dict[str, Any]], wrong: str) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    with pytest.raises(ValueError, match=wrong):
        load_examples(path, kind)


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029"])
def test_text_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path, separator: str) -> None:
    """JSON lets them be; only a line feed ends a line."""
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps({"text": f"a{separator}b"}, ensure_ascii=False) + "\n", "utf-8")
    assert [example["text"] for example in load_examples(path, "perplexity")] == [f"a{separator}b"]
    body = {"choices": [{"text": f"c{separator}d"}]}
    line = {"custom_id": "x", "response": {"status_code": 200, "body": body}, "error": None}
    (tmp_path / "out.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n", "utf-8")
    assert eval_batch.read_answers(tmp_path)["x"]["text"] == f"c{separator}d"


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_no_examples_are_no_evaluation(limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval_batch.py", "choice", "--task", "configs/eval/choice.jsonl", "--limit", limit]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        eval_batch.main()
    assert (ended.value.code, f"--limit: wanted at least 1, got {limit}" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(("content", "wrong"), [("not JSON", "task.jsonl:1: "), ('{"text": ""}', "nothing to score")])
def test_a_task_that_cannot_be_evaluated_is_one_line(
    content: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text(content, "utf-8")
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", "perplexity", "--task", str(path)])
    assert eval_batch.main() == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), wrong in told) == (1, True)


def test_a_model_that_cannot_be_fetched_now_is_no_bad_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise NotFetched("--model: the Hub says nothing")

    monkeypatch.setattr(eval_batch, "resolve_model", refuse)
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", "choice", "--task", "configs/eval/choice.jsonl"])
    assert eval_batch.main() == 1
    assert capsys.readouterr().err == "eval_batch: --model: the Hub says nothing\n"


def test_a_request_that_failed_is_one_line_and_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "import os"}\n', "utf-8")
    line = {"custom_id": "1/0", "response": {"status_code": 400, "body": {"message": "too long"}}, "error": None}
    later = {"custom_id": "2/0", "response": None, "error": {"code": "invalid_answer"}}
    fine = {"custom_id": "3/0", "response": {"status_code": 200, "body": {"choices": [{"text": ""}]}}, "error": None}
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (fine, line, later)), "utf-8")
    monkeypatch.setattr(eval_batch, "run_batch", lambda _, **_options: 0)
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", "perplexity", "--task", str(path), "--work-dir", str(tmp_path)])
    assert eval_batch.main() == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(
        "eval_batch: 1/0 was not answered: {'message': 'too long'}; 2 of 3 requests failed; --retry-failed asks"
    )


@pytest.mark.parametrize("kind", ["choice", "perplexity"])
@pytest.mark.parametrize("logprobs", [None, {"token_logprobs": []}, {"token_logprobs": [-0.5]}])
def test_a_server_that_does_not_score_the_prompt_is_told_of_and_no_score_is_made_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    logprobs: dict[str, Any] | None,
) -> None:
    """It may leave out log-probabilities, or the echo, so that there are those of other tokens."""
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "import os", "context": "import ", "choices": ["os", "sys"], "answer": 0}\n', "utf-8")
    body = {"choices": [{"text": "", "logprobs": logprobs}]}
    lines = [{"custom_id": f"1/{i}", "response": {"status_code": 200, "body": body}, "error": None} for i in range(2)]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    monkeypatch.setattr(eval_batch, "run_batch", lambda _, **_options: 0)
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", kind, "--task", str(path), "--work-dir", str(tmp_path)])
    assert eval_batch.main() == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("eval_batch: 1/0 was answered with log-probabilities of ")


def test_of_a_large_task_s_answers_only_what_is_scored_is_kept(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(1000)]
    logprobs = {"tokens": tokens, "token_logprobs": [None, *[-0.5] * 999], "text_offset": [*range(1000)], "top_logprobs": None}
    body = {"choices": [{"text": "", "logprobs": logprobs}]}
    line = json.dumps({"custom_id": "x", "response": {"status_code": 200, "body": body}, "error": None}) + "\n"
    (tmp_path / "out.jsonl").write_text(line, "utf-8")
    answer = eval_batch.read_answers(tmp_path)["x"]
    assert list(answer["logprobs"]) == ["token_logprobs"]
    assert sys.getsizeof(answer["logprobs"]["token_logprobs"]) < 10_000
    assert list(answer["logprobs"]["token_logprobs"]) == [0.0, *[-0.5] * 999]


@pytest.mark.parametrize("name", ["no/scores.json", "."], ids=["no directory", "a directory"])
def test_scores_that_could_not_be_written_are_told_of_before_anything_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval_batch.py", "choice", "--task", "configs/eval/choice.jsonl", "--json", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        eval_batch.main()
    assert (ended.value.code, "--json: cannot write" in capsys.readouterr().err) == (2, True)


def test_a_work_dir_takes_one_evaluation_and_no_other_begins_on_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, work_dir = tmp_path / "task.jsonl", tmp_path / "work"
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", "perplexity", "--task", str(task), "--work-dir", str(work_dir)])
    runs: list[list[str]] = []
    monkeypatch.setattr(eval_batch, "run_batch", lambda command, **_options: runs.append(command) or 1)
    for text in ("import os", "import sys"):  # nothing has been answered: another task may take its place
        task.write_text(json.dumps({"text": text}) + "\n", "utf-8")
        assert eval_batch.main() == 1
    (work_dir / "out.jsonl.journal").write_text("", "utf-8")
    assert eval_batch.main() == 1
    task.write_text('{"text": "import re"}\n', "utf-8")
    assert eval_batch.main() == 2
    assert f"--work-dir: {str(work_dir)!r} holds another evaluation" in capsys.readouterr().err
    assert len(runs) == 3


def test_a_work_dir_that_is_a_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text('{"text": "import os"}\n', "utf-8")
    monkeypatch.setattr(sys, "argv", ["eval_batch.py", "perplexity", "--task", str(task), "--work-dir", str(task)])
    assert eval_batch.main() == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), told.startswith("eval_batch: --work-dir: ")) == (1, True)


@pytest.mark.parametrize(("missing", "named"), [(["torch"], "torch"), (["torch", "transformers"], "torch and transformers")])
def test_a_reference_that_is_not_installed_is_told_of_before_anything_runs(
    missing: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval_batch.py", "choice", "--task", "configs/eval/choice.jsonl", "--reference", "transformers"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(eval_batch, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.setattr(eval_batch, "run_batch", lambda _, **_options: pytest.fail("the batch ran"))
    with pytest.raises(SystemExit) as ended:
        eval_batch.main()
    assert ended.value.code == 2
    assert f"--reference: {named} cannot be imported; scripts/setup.sh --test brings them" in capsys.readouterr().err
