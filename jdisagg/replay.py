"""Runs a schedule log again: `python -m jdisagg.replay LOG.jsonl` says whether every call gives what it gave.

`--why REQUEST_ID` also tells that request's life, with times: what it waited for, its chunks and steps, its end. The id that a
client was given tells every choice of the request. No device, no network: a log from a production worker is enough to study a
schedule, or to see that a change keeps it.
"""

from __future__ import annotations

import argparse
import difflib
import glob
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jdisagg.core.errors import JdisaggError
from jdisagg.sched.biography import Biography
from jdisagg.sched.log import CALLS, CALLS_WITH_TIME, LoggedScheduler
from jdisagg.sched.log_codec import decode, encode

_NUM_NEAREST = 5
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # name, arguments


class DamagedLog(ValueError):
    """A line that is no call of a scheduler. `line` counts from 1; `is_cut`: the writer was stopped while writing it."""

    def __init__(self, line: int, message: str, *, is_cut: bool = False) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.is_cut = is_cut


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
    damage: DamagedLog | None = None  # a line cut off or unreadable; everything before it was replayed
    request_ids: tuple[str, ...] = ()  # in order of their coming
    story: tuple[str, ...] = ()  # of the request asked for


def replay(lines: Iterable[str], why: str | None = None) -> Report:
    """Replay a log's lines up to its end, the first difference or the first damaged line; tell the life of request `why`, or
    the lives of its choices (`why`/0, /1, ..) and hand-offs (`why`/0#2).

    Raises DamagedLog when the log does not start with a scheduler's sizes.
    """
    calls = _parse(lines)
    scheduler = _make_scheduler(*next(calls, (1, {})))
    biographies: dict[str, Biography] = {}  # by request id
    num_calls = num_plans = 0
    now_s = 0.0
    request_ids: dict[str, None] = {}
    difference = damage = None
    try:
        for number, line in calls:
            call, args, kwargs = _read_call(number, line)
            now_s = max(now_s, args[-1] if call in CALLS_WITH_TIME else line.get("at_s", 0.0))
            if call == "add":
                request_id = args[0].request_id
                request_ids[request_id] = None
                if why is not None and request_id not in biographies and _is_of(request_id, why):
                    biographies[request_id] = Biography(scheduler, request_id)
            for biography in biographies.values():
                biography.before()
            result, error = _run(scheduler, call, args, kwargs)
            for biography in biographies.values():
                biography.after(call, args, now_s, result, error)
            num_calls += 1
            num_plans += call == "schedule"
            wanted = {key: line[key] for key in ("result", "raised") if key in line}
            got = {"result": encode(result)} if error is None else {"raised": type(error).__name__}
            if got != wanted:
                difference = Difference(number, call, wanted, got)
                break
    except DamagedLog as found:
        damage = found
    for biography in biographies.values():
        biography.close(now_s)
    story = tuple(line for biography in biographies.values() for line in biography.lines)
    return Report(num_calls, num_plans, difference, damage, tuple(request_ids), story)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: all the same; 1: a difference, printed; 2: not a log, a damaged line, or an unknown request.

    A last line that was cut off is named and left out: logs of workers that were killed end so.
    """
    parser = argparse.ArgumentParser(prog="python -m jdisagg.replay", description=__doc__)
    parser.add_argument("log", type=Path, help="file written by --schedule-log")
    parser.add_argument("--why", metavar="REQUEST_ID", help="tell this request's life; the id a client got: all its choices'")
    options = parser.parse_args(argv)
    try:
        with options.log.open(encoding="utf-8", errors="replace") as lines:
            report = replay(lines, options.why)
    except FileNotFoundError:
        beside = sorted(path.name for path in options.log.parent.glob(f"{glob.escape(options.log.name)}.*"))
        hint = f"; there are {', '.join(beside)}" if beside else ""
        print(f"{options.log}: no such file{hint}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"{options.log}: {error}", file=sys.stderr)
        return 2
    for line in report.story:
        print(line)
    return _verdict(options.log, options.why, report)


def _verdict(path: Path, why: str | None, report: Report) -> int:
    status = 0
    if report.damage is not None:
        print(f"{path}: {report.damage}; {report.num_calls} calls before it were replayed", file=sys.stderr)
        status = 0 if report.damage.is_cut else 2
    if why is not None and not report.story:
        print(f"{path}: no request {why!r}{_nearest(why, report.request_ids)}", file=sys.stderr)
        status = 2
    if report.difference is not None:
        different = report.difference
        print(f"{path}:{different.line}: {different.call} differs after {report.num_plans} plans")
        print(f"  wanted {json.dumps(different.wanted)}\n  got    {json.dumps(different.got)}")
        return 1
    if status == 0:
        print(f"{report.num_calls} calls, {report.num_plans} plans: all the same")
    return status


def _is_of(request_id: str, wanted: str) -> bool:
    return request_id == wanted or request_id.startswith((f"{wanted}/", f"{wanted}#"))


def _nearest(wanted: str, known: tuple[str, ...]) -> str:
    if not known:
        return "; the log has no request"
    begun = [name for name in known if name.startswith(wanted) or wanted.startswith(name)]
    close = [*begun, *difflib.get_close_matches(wanted, known, n=_NUM_NEAREST, cutoff=0.3)] or list(known)
    named = list(dict.fromkeys(close))[:_NUM_NEAREST]
    return f" among the {len(known)} of the log; the nearest: {', '.join(named)}"


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            raise DamagedLog(number, "cut off before its end, as by a crash", is_cut=True)
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise DamagedLog(number, f"not JSON: {error}") from error


def _make_scheduler(number: int, line: dict[str, Any]) -> LoggedScheduler:
    if not isinstance(line, dict) or line.get("call") != "__init__":
        raise DamagedLog(number, "not a schedule log: the first line must be the call of __init__")
    try:
        config = replace(decode(line["args"])[0], schedule_log=None)
        return LoggedScheduler(config, **{key: decode(value) for key, value in line["kwargs"].items()})
    except (LookupError, TypeError, AttributeError, ValueError, JdisaggError) as error:
        raise DamagedLog(number, f"no scheduler can be made of it: {type(error).__name__}: {error}") from error


def _read_call(number: int, line: Any) -> _Call:
    try:
        call, args = line["call"], decode(line["args"])
        if call not in CALLS or not isinstance(args, tuple):
            raise DamagedLog(number, f"{call!r} is no call of a scheduler")
        if call in CALLS_WITH_TIME and not (args and isinstance(args[-1], int | float)):
            raise DamagedLog(number, f"{call} without a time")
        if not isinstance(line.get("at_s", 0.0), int | float):
            raise DamagedLog(number, f"at_s is {line['at_s']!r}, wanted seconds")
        if call == "add":
            _ = args[0].request_id
        return call, args, {key: decode(value) for key, value in line["kwargs"].items()}
    except DamagedLog:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DamagedLog(number, f"not a call of a scheduler: {type(error).__name__}: {error}") from error


def _run(scheduler: LoggedScheduler, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Exception | None]:
    try:
        return getattr(scheduler, call)(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - whatever was raised then should be raised now; it is compared with the log
        return None, error


if __name__ == "__main__":
    sys.exit(main())
