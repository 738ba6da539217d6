"""Runs a schedule log again and says whether every call gives what it gave: `python -m jdisagg.replay LOG.jsonl`.

No device, no network: a log from a production worker is enough to study a schedule, or to see that a change keeps it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.sched.log_codec import decode, encode
from jdisagg.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that did not give what the log says."""

    line: int  # from 1
    call: str
    wanted: Any
    got: Any


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay saw."""

    num_calls: int
    num_plans: int
    difference: Difference | None


def replay(lines: Iterable[str]) -> Report:
    """Replay a log's lines up to its end or the first difference. A last line cut off by a crash is left out.

    Raises ValueError when the log does not start with a scheduler's sizes.
    """
    calls = _parse(lines)
    _, first = next(calls, (0, {}))
    if first.get("call") != "__init__":
        raise ValueError("not a schedule log: the first line must be the call of __init__")
    config = replace(decode(first["args"])[0], schedule_log=None)
    scheduler = Scheduler(config, **{key: decode(value) for key, value in first["kwargs"].items()})
    num_calls = num_plans = 0
    for number, line in calls:
        wanted = {key: line[key] for key in ("result", "raised") if key in line}
        got = _run(scheduler, line)
        num_calls += 1
        num_plans += line["call"] == "schedule"
        if got != wanted:
            return Report(num_calls, num_plans, Difference(number, line["call"], wanted, got))
    return Report(num_calls, num_plans, None)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: all the same; 1: a difference, printed; 2: not a log."""
    parser = argparse.ArgumentParser(prog="python -m jdisagg.replay", description=__doc__)
    parser.add_argument("log", type=Path, help="file written by --schedule-log")
    path = parser.parse_args(argv).log
    try:
        with path.open(encoding="utf-8") as lines:
            report = replay(lines)
    except (OSError, ValueError, KeyError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if report.difference is None:
        print(f"{report.num_calls} calls, {report.num_plans} plans: all the same")
        return 0
    different = report.difference
    print(f"{path}:{different.line}: {different.call} differs after {report.num_plans} plans")
    print(f"  wanted {json.dumps(different.wanted)}\n  got    {json.dumps(different.got)}")
    return 1


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            yield number, json.loads(line)


def _run(scheduler: Scheduler, line: dict[str, Any]) -> dict[str, Any]:
    kwargs = {key: decode(value) for key, value in line["kwargs"].items()}
    try:
        return {"result": encode(getattr(scheduler, line["call"])(*decode(line["args"]), **kwargs))}
    except (RequestError, AssertionError) as error:
        return {"raised": type(error).__name__}


if __name__ == "__main__":
    sys.exit(main())
