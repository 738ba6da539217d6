"""Evaluate a model offline on small tasks, on top of `jdisagg.batch`.

    python scripts/eval_batch.py --task configs/eval/choice.jsonl choice [--model MODEL [serve flags] | --server URL]

Tasks are JSON lines:
    choice      {"context", "choices": [..], "answer": i}       accuracy of the likeliest continuation
    generate    {"prompt", "expected" | "contains", ..}         greedy answers: exact match, or containing a text
    perplexity  {"text"}                                        nats per token, bits per byte

Prints a table and JSON. `--reference transformers` scores the same token ids with transformers as well. `--work-dir` keeps
the batch files: a killed evaluation started again with the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from eval_tasks.tasks import TASKS, Answers, Probe, Scores, load_examples, scored_part

from jdisagg.batch.__main__ import GOES_ON
from jdisagg.batch.__main__ import main as run_batch
from jdisagg.batch.journal import journal_path
from jdisagg.batch.results import is_answered
from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import resolve_model
from jdisagg.text.tokenizer import Tokenizer

EXIT_BAD_TASK = 2
OUTPUT = "out.jsonl"
REFERENCE_NEEDS = ("torch", "transformers")
NOTHING_KEPT = "without --work-dir nothing is kept, the same command begins anew"


def main() -> int:
    """Evaluate one task; returns the exit status: that of the batch when it fails, 1 when the model cannot be fetched now, 2
    for a task that cannot be evaluated, be it that one of its requests failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=sorted(TASKS))
    parser.add_argument("--task", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--model", default="demo", help="the model, and whose tokenizer is used (default demo)")
    parser.add_argument("--server", metavar="URL", help="evaluate what this server serves; --model names the same model")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N examples")
    parser.add_argument("--reference", choices=("transformers",), help="compare with another implementation")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep batch input and output here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores here as well")
    args, flags = parser.parse_known_args()
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit: wanted at least 1, got {args.limit}")
    if args.reference and (missing := [name for name in REFERENCE_NEEDS if find_spec(name) is None]):
        parser.error(f"--reference: {' and '.join(missing)} cannot be imported; scripts/setup.sh --test brings them")
    if args.json is not None:
        try:
            args.json.open("a").close()
        except OSError as error:
            parser.error(f"--json: cannot write {str(args.json)!r}: {error.strerror}; choose another")
    task = TASKS[args.kind]
    try:
        directory = resolve_model(args.model, weights=False)
        tokenizer = Tokenizer.from_directory(directory)
        examples = load_examples(args.task, args.kind)[: args.limit]
        probes = [probe for example in examples for probe in task.probes(example, tokenizer)]
        if not probes:
            raise ValueError(f"{args.task}: no text of more than one token, so that there is nothing to score")
    except (ValueError, OSError, ConfigError) as error:
        print(f"eval_batch: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, ConfigError) else EXIT_BAD_TASK
    flags = ["--server", args.server, *flags] if args.server else ["--model", args.model, *flags]
    scores: dict[str, Scores] = {}
    scratch = tempfile.TemporaryDirectory()
    with scratch:
        work_dir = args.work_dir or Path(scratch.name)
        try:
            source = write_probes(probes, work_dir)
        except (OSError, ConfigError) as error:
            print(f"eval_batch: --work-dir: {error}", file=sys.stderr)
            return EXIT_BAD_TASK
        what_next = GOES_ON if args.work_dir else NOTHING_KEPT
        flags = ["--input", str(source), "--output", str(work_dir / OUTPUT), *flags]
        status = run_batch(flags, tidy=scratch.cleanup, what_next=what_next)
        if status:
            return status
        try:
            scores["jdisagg"] = task.score(examples, read_answers(work_dir), tokenizer)
        except ValueError as error:
            print(f"eval_batch: {error}", file=sys.stderr)
            return EXIT_BAD_TASK
    if args.reference:
        reference = importlib.import_module("eval_tasks.reference")  # needs torch
        scores[args.reference] = task.score(examples, reference.reference_answers(directory, probes), tokenizer)
    report(args.kind, len(examples), scores, args.json)
    return 0


def write_probes(probes: list[Probe], work_dir: Path) -> Path:
    """The input file of the batch. Raises ConfigError when `work_dir` holds the answers to another one, and OSError."""
    work_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(probe.line()) + "\n" for probe in probes)
    source, output = work_dir / "in.jsonl", work_dir / OUTPUT
    if source.exists() and source.read_bytes() == text.encode():
        return source
    if source.exists() and (output.exists() or journal_path(output).exists()):
        raise ConfigError(f"{str(work_dir)!r} holds another evaluation; choose another directory or empty this one")
    source.write_text(text, "utf-8")
    return source


def read_answers(work_dir: Path) -> Answers:
    """What is scored of first choices, by probe name. Raises ValueError when requests failed, with what the first one got."""
    answers: Answers = {}
    problems = 0
    first = ""
    with (work_dir / OUTPUT).open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            response = line["response"]
            if is_answered(line):
                answers[line["custom_id"]] = scored_part(response["body"]["choices"][0])
                continue
            problems += 1
            first = first or f"{line['custom_id']} was not answered: {line['error'] if response is None else response['body']}"
    if problems:
        again = "--retry-failed asks for them again where --work-dir kept the rest"
        raise ValueError(f"{first}; {problems} of {problems + len(answers)} requests failed; {again}")
    return answers


def report(kind: str, num_examples: int, scores: dict[str, Scores], path: Path | None) -> None:
    """A table and one JSON line on stdout; the JSON also to `path`."""
    print(f"{kind}, {num_examples} examples" + "".join(f"{name:>16}" for name in scores))
    for metric in scores["jdisagg"]:
        print(f"  {metric:<24}" + "".join(f"{values[metric]:>16.4f}" for values in scores.values()))
    summary = json.dumps({"task": kind, "examples": num_examples, "scores": scores})
    print(summary)
    if path is not None:
        path.write_text(summary + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
