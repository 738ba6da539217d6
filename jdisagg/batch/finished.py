"""A finished output: whose it is, who answered, and which of its lines are asked again (`--retry-failed`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jdisagg.batch import strict_json
from jdisagg.batch.journal import Journal, journal_path
from jdisagg.batch.results import is_output_line, line_id, stays, weights_of
from jdisagg.batch.runner import Batch, Finished
from jdisagg.batch.sender import Served
from jdisagg.core.errors import ConfigError

_LINES_AT_ONCE = 1000


def check_unpublished(batch: Batch) -> bool:
    """False when a former run has finished this batch. Raises ConfigError when the output is another batch's."""
    if not batch.output.exists() or journal_path(batch.output).exists():
        return True
    ids = [line and line.get("id") for line in _lines(batch.output)]
    if ids != [line_id(batch.id, number) for number in batch.numbers()]:
        raise ConfigError(
            f"--output: {batch.output} exists and is not the output of this batch (its input, --seed and engine); "
            "remove it or choose another --output"
        )
    return False


def answered_by(output: Path) -> Served | None:
    """The model whose answers a finished output holds; None where none of them says."""
    bodies = ((line["response"] or {}).get("body") for line in _lines(output) if line is not None)
    named = next((body for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str)), None)
    return None if named is None else Served(named["model"], weights_of(named))


def has_failed_lines(output: Path) -> bool:
    """Whether another run may answer more of this finished output."""
    return any(line is not None and not stays(line) for line in _lines(output))


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
    for line, number in zip(_lines(batch.output), batch.numbers(), strict=False):
        if line is not None and line.get("id") == line_id(batch.id, number) and stays(line):
            yield number, line


def _lines(output: Path) -> Iterator[dict[str, Any] | None]:
    """None for a line that no batch wrote."""
    with output.open("rb") as file:
        for raw in file:
            try:
                line = strict_json.decode(raw)
            except ValueError:
                line = None
            yield line if is_output_line(line) else None
