"""TTFT and time to the second token, 1P+1D minus unified, in turns; and how much of the transfer was hidden."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench_kit.client import TimedStream
from bench_kit.figures import differences, met, milliseconds, table
from bench_kit.model import Prompts

from disagg_bench.overlap import OverlapLog
from disagg_bench.workers import Workers

ALLOWED_MS = 5.0
ALLOWED_SHARE = 0.10  # of the prefill time
HIDDEN_TARGET, HIDDEN_AT_TOKENS = 0.80, 4096
FIRST_BYTE_TARGET = 0.90
_MAX_TOKENS = 4
_EXPOSED = "jdisagg_request_transfer_seconds_sum"
_BYTES = "jdisagg_transfer_bytes_total"
_FETCH = "jdisagg_transfer_seconds_sum"
_HIDDEN = "jdisagg_transfer_hidden_seconds_total"
_COLUMNS = "tokens, unified, 1P+1D, difference, allowed, target, 2nd token, 1st to 2nd: unified, 1P+1D, same, CPU: U, P, D"


@dataclass(kw_only=True)
class Point:
    """One prompt length: pairs of the same prompt on both."""

    num_tokens: int
    unified: list[TimedStream] = field(default_factory=list)
    disaggregated: list[TimedStream] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)  # first token known to KV complete, as D measured it
    counted_hidden: list[float] = field(default_factory=list)  # the share by D's own metric
    num_bytes: list[float] = field(default_factory=list)
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ("unified", "P", "D")})


def measure(workers: Workers, prompts: Prompts, lengths: Sequence[int], num_prompts: int) -> list[Point]:
    """Concurrency 1; who comes first alternates."""
    for client in (workers.unified.client, workers.decode.client):
        client.run(prompts.next(lengths[0]), _MAX_TOKENS)  # connections
    points = []
    for num_tokens in lengths:
        point = Point(num_tokens=num_tokens)
        for number in range(num_prompts):
            prompt = prompts.next(num_tokens)
            turns: list[Callable[[], None]] = [
                lambda prompt=prompt, point=point: _run_unified(workers, prompt, point),
                lambda prompt=prompt, point=point: _run_disaggregated(workers, prompt, point),
            ]
            for turn in turns if number % 2 == 0 else reversed(turns):
                turn()
        points.append(point)
    return points


def _run_unified(workers: Workers, prompt: Sequence[int], point: Point) -> None:
    before_s = workers.unified.cpu_s()
    point.unified.append(workers.unified.client.run(prompt, _MAX_TOKENS))
    point.cpu_s["unified"].append(workers.unified.cpu_s() - before_s)


def _run_disaggregated(workers: Workers, prompt: Sequence[int], point: Point) -> None:
    pair = {"P": workers.prefill, "D": workers.decode}
    before = workers.decode.counters()
    before_s = {name: worker.cpu_s() for name, worker in pair.items()}
    point.disaggregated.append(workers.decode.client.run(prompt, _MAX_TOKENS))
    for name, worker in pair.items():
        point.cpu_s[name].append(worker.cpu_s() - before_s[name])
    after = workers.decode.counters()
    grown = {name: after[name] - before[name] for name in (_EXPOSED, _BYTES, _FETCH, _HIDDEN)}
    point.exposed_s.append(grown[_EXPOSED])
    point.num_bytes.append(grown[_BYTES])
    if grown[_FETCH]:
        point.counted_hidden.append(grown[_HIDDEN] / grown[_FETCH])


def summary(point: Point, log: OverlapLog) -> dict[str, Any]:
    """Figures of one length; milliseconds and shares."""
    unified, disaggregated = point.unified, point.disaggregated
    first = differences([s.first_s for s in disaggregated], [s.first_s for s in unified])
    second = differences([s.second_s for s in disaggregated], [s.second_s for s in unified])
    prefill_ms = milliseconds([s.first_s for s in unified])
    overlaps = [log.of(stream.request_id, stream.token_s[0]) for stream in disaggregated]
    allowed_ms = ALLOWED_MS + ALLOWED_SHARE * prefill_ms
    return {
        "num_tokens": point.num_tokens,
        "num_prompts": len(unified),
        "unified_ttft_ms": prefill_ms,
        "disaggregated_ttft_ms": milliseconds([s.first_s for s in disaggregated]),
        "ttft_difference_ms": {f"p{p}": milliseconds(first, p / 100) for p in (25, 50, 75)},
        "allowed_ms": allowed_ms,
        "ttft": met(milliseconds(first) <= allowed_ms),
        "second_token_difference_ms": milliseconds(second),
        "unified_first_to_second_ms": milliseconds([s.gap_s for s in unified]),
        "disaggregated_first_to_second_ms": milliseconds([s.gap_s for s in disaggregated]),
        "exposed_transfer_ms": milliseconds(point.exposed_s),
        "fetch_ms": milliseconds([o.fetch_s for o in overlaps]),
        "cpu_ms": {name: milliseconds(seconds) for name, seconds in point.cpu_s.items()},
        "hidden_share": statistics.median([o.hidden_share for o in overlaps]),
        "hidden_share_by_metric": statistics.median(point.counted_hidden) if point.counted_hidden else None,
        "num_chunks": overlaps[0].num_chunks,
        "first_byte_before_last_chunk": sum(o.first_before_last for o in overlaps) / len(overlaps),
        "bytes": statistics.median(point.num_bytes),
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in zip(unified, disaggregated, strict=True)),
    }


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The two tables."""
    return [
        *table(
            "1. First and second token: 1P+1D minus unified on P's core, the same prompts in turns; ms, medians [p25, p75]",
            _COLUMNS.split(", "),
            [_first_cells(row) for row in rows],
        ),
        *table(
            "2. Transfer hidden behind prefill; exposed = from the first token until all KV is there",
            "tokens, chunks, MiB, fetch ms, exposed ms, hidden, by metric, target, before last chunk, target".split(", "),
            [_overlap_cells(row) for row in rows],
        ),
        "   before last chunk: prompts whose first piece had arrived on D when P's last chunk started",
    ]


def _first_cells(row: dict[str, Any]) -> list[str]:
    difference = row["ttft_difference_ms"]
    return [
        str(row["num_tokens"]),
        f"{row['unified_ttft_ms']:.1f}",
        f"{row['disaggregated_ttft_ms']:.1f}",
        f"{difference['p50']:+.1f} [{difference['p25']:+.1f}, {difference['p75']:+.1f}]",
        f"{row['allowed_ms']:.1f}",
        row["ttft"],
        f"{row['second_token_difference_ms']:+.1f}",
        f"{row['unified_first_to_second_ms']:.1f}",
        f"{row['disaggregated_first_to_second_ms']:.1f}",
        f"{row['same_tokens']} of {row['num_prompts']}",
        *(f"{cpu_ms:.0f}" for cpu_ms in row["cpu_ms"].values()),
    ]


def _overlap_cells(row: dict[str, Any]) -> list[str]:
    early, hidden, counted = row["first_byte_before_last_chunk"], row["hidden_share"], row["hidden_share_by_metric"]
    return [
        str(row["num_tokens"]),
        str(row["num_chunks"]),
        f"{row['bytes'] / 2**20:.1f}",
        f"{row['fetch_ms']:.1f}",
        f"{row['exposed_transfer_ms']:.1f}",
        f"{hidden:.0%}",
        "-" if counted is None else f"{counted:.0%}",
        met(hidden >= HIDDEN_TARGET) if row["num_tokens"] == HIDDEN_AT_TOKENS else "",
        f"{early:.0%}",
        met(early >= FIRST_BYTE_TARGET) if row["num_chunks"] > 2 else "",
    ]
