"""A finished output: whose it is, who answered, and which of its lines are asked again (`--retry-failed`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jdisagg.batch import strict_json
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.lines import BadLine, Call, read_lines
from jdisagg.batch.results import is_answered, is_output_line, line_id, stays, weights_of
from jdisagg.batch.runner import Batch, Finished
from jdisagg.batch.sender import Served
from jdisagg.core.errors import ConfigError

_LINES_AT_ONCE = 1000


def check_unpublished(batch: Batch, *, retry_failed: bool) -> bool:
    """False when a former run has finished this batch; when `retry_failed`, True where lines that failed have changed since.
    Raises ConfigError when the output is another batch's."""
    if not batch.output.exists() or journal_path(batch.output).exists():
        return True
    ids = [line and line.get("id") for line in _lines(batch.output)]
    if ids == [line_id(batch.id, number) for number in batch.numbers()]:
        return False
    if not _is_mended(batch):
        raise ConfigError(
            f"--output: {batch.output} exists and is not the output of this batch (its input, --seed and engine); "
            "remove it or choose another --output"
        )
    if not retry_failed:
        raise ConfigError(
            f"--output: {batch.output} is of another input, from which this one differs in lines that failed only: "
            "--retry-failed asks for those and keeps all answers; or choose another --output"
        )
    return True


def _is_mended(batch: Batch) -> bool:
    """Whether all answers of the output are those of this input's lines, though others of that have changed."""
    asked = read_lines(batch.input, seed=batch.seed)
    return all(
        line is not None
        and now is not None
        and str(line.get("id")).endswith(f"_{now.number}")
        and (not is_answered(line) or _is_answer(batch, line, now))
        for line, now in zip_longest(_lines(batch.output), asked)
    )


def _is_answer(batch: Batch, line: dict[str, Any], now: Call | BadLine) -> bool:
    """Whether an output line answers what an input line asks now."""
    return is_answered(line) and isinstance(now, Call) and line["response"].get("request_id") == batch.request_id(now)


def answered_by(output: Path) -> Served | None:
    """The model whose answers a finished output holds; None where none of them says."""
    bodies = ((line["response"] or {}).get("body") for line in _lines(output) if line is not None)
    named = next((body for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str)), None)
    return None if named is None else Served(named["model"], weights_of(named))


def has_lines_to_retry(output: Path) -> bool:
    """Whether asking again may answer more of this finished output."""
    return any(line is not None and not stays(line) for line in _lines(output))


def has_lines_to_mend(output: Path) -> bool:
    """Whether lines failed in this finished output; of one that has none to retry: they are no requests."""
    return any(line is not None and not is_answered(line) for line in _lines(output))


def end_former_run(batch: Batch, header: dict[str, Any]) -> None:
    """Publish what one left that was killed behind its last line: what failed in that is asked again, too. Raises ConfigError,
    WriteFailed."""
    if journal_path(batch.output).exists():
        with Journal(batch.output, header) as journal:
            numbers = batch.numbers()
            if len(journal) == len(numbers):
                journal.publish(numbers)


def keep_answers(batch: Batch, journal: Journal) -> None:
    """What a finished output need not be asked again for counts as answered. The output stays until the next one is whole; an
    interrupted run takes the rest when it is repeated. Raises WriteFailed."""
    kept: list[Finished] = []
    for number, line in _answers(batch):
        if number not in journal:
            kept.append((number, line))
        if len(kept) == _LINES_AT_ONCE:
            journal.append(kept)
            kept = []
    if kept:
        journal.append(kept)


def _answers(batch: Batch) -> Iterator[Finished]:
    """Under the ids of this batch, should it be of another one whose failed lines were mended."""
    for line, now in zip(_lines(batch.output), read_lines(batch.input, seed=batch.seed), strict=False):
        if line is None:
            continue
        own = line_id(batch.id, now.number)
        if (line.get("id") == own and stays(line)) or _is_answer(batch, line, now):
            yield now.number, line | {"id": own}


def _lines(output: Path) -> Iterator[dict[str, Any] | None]:
    """None for a line that no batch wrote."""
    with output.open("rb") as file:
        for raw in file:
            try:
                line = strict_json.decode(raw)
            except ValueError:
                line = None
            yield line if is_output_line(line) else None
