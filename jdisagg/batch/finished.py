"""A finished output: whose it is, who answered, and which of its lines are asked again (`--retry-failed`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jdisagg.batch.journal import Journal
from jdisagg.batch.lines import BadLine, Call, read_lines, read_lines_but
from jdisagg.batch.passes import Pauses, tell_of_pass
from jdisagg.batch.results import is_answered, line_id, read_output, stays, weights_of
from jdisagg.batch.runner import Batch, Finished, to_its_end
from jdisagg.batch.sender import Served
from jdisagg.batch.summary import Summary
from jdisagg.core.errors import ConfigError

_LINES_AT_ONCE = 1000


def end_former_run(batch: Batch, journal: Journal) -> bool:
    """Publish what one left that was killed behind its last line, or whose output found no room. Whether it had left that.
    Raises ConfigError, WriteFailed."""
    if len(journal) < batch.num_lines:
        return False
    numbers = list(batch.numbers())
    if not all(number in journal for number in numbers):
        return False
    journal.publish(numbers)
    return True


def check_finished(batch: Batch, *, retry_failed: bool) -> Summary | None:
    """Of an output that a former run has finished; None where lines of it are to be asked now, since `retry_failed`. Raises
    ConfigError when the output is another batch's."""
    found = Summary()
    tell_of_pass(batch.output, "whether it is this batch's, and complete")
    for line, number in zip_longest(read_output(batch.output), batch.numbers()):
        if line is None or number is None or line.get("id") != line_id(batch.id, number):
            break
        found.add(line)
    else:
        return None if retry_failed and found.has_lines_to_retry else found
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
    return None


def _is_mended(batch: Batch) -> bool:
    """Whether all answers of the output are those of this input's lines, though others of that have changed."""
    asked = read_lines(batch.input, seed=batch.seed)
    return all(
        line is not None
        and now is not None
        and str(line.get("id")).endswith(f"_{now.number}")
        and (not is_answered(line) or _is_answer(batch, line, now))
        for line, now in zip_longest(read_output(batch.output), asked)
    )


def _is_answer(batch: Batch, line: dict[str, Any], now: Call | BadLine) -> bool:
    """Whether an output line answers what an input line asks now."""
    return is_answered(line) and isinstance(now, Call) and line["response"].get("request_id") == batch.request_id(now)


def answered_by(output: Path) -> Served | None:
    """The model whose answers a finished output holds; None where none of them says."""
    bodies = ((line["response"] or {}).get("body") for line in read_output(output) if line is not None)
    named = next((body for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str)), None)
    return None if named is None else Served(named["model"], weights_of(named))


async def keep_answers(batch: Batch, journal: Journal) -> None:
    """What a finished output need not be asked again for counts as answered. The output stays until the next one is whole; an
    interrupted run takes the rest when it is repeated. Raises WriteFailed."""
    kept: list[Finished] = []
    pauses = Pauses()
    tell_of_pass(batch.output, "which answers are kept")
    for answer in _answers(batch):
        await pauses.rest()
        if answer is not None and answer[0] not in journal:
            kept.append(answer)
        if len(kept) == _LINES_AT_ONCE:
            await to_its_end(journal.append, kept)
            kept = []
    if kept:
        await to_its_end(journal.append, kept)


def _answers(batch: Batch) -> Iterator[Finished | None]:
    """Under the ids of this batch, should it be of another one whose failed lines were mended. None where there is none to keep
    in what was read."""
    written = read_output(batch.output)
    for now in read_lines_but(batch.input, (), seed=batch.seed):
        line = None if now is None else next(written, None)
        if now is None or line is None:
            yield None
            continue
        own = line_id(batch.id, now.number)
        is_kept = (line.get("id") == own and stays(line)) or _is_answer(batch, line, now)
        yield (now.number, line | {"id": own}) if is_kept else None
