"""What does the scheduler cost? Decisions and books only, with a runner that answers at once; a CPU, no jax.

    PYTHONPATH=. python scripts/bench_scheduler.py [--nano-vllm DIR] [--runs 5] [--quick] [--json FILE]

1. Steady decode and churn (outputs of 32 to 96 tokens, every end brings one more) at 1 to 1,024 running sequences, with up to
   10,000 more waiting. 2. Page operations; queueing and cancelling. 3. The same requests given to nano-vllm's scheduler
   (--nano-vllm: a checkout) and to transformers' continuous batching (when installed), in turns, so that their ratios to ours
   are of one run. Every figure is CPU time of the thread; medians over the runs, with the lowest and highest run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_kit.figures import met, quantile
from bench_kit.machine import machine, one_line
from sched_bench import hf, nano, ours, pages
from sched_bench.load import PAGE_SIZE, Load, Subject, Tick, drive

TARGET_PER_REQUEST_US = 4.0
TARGET_256_US = 1000.0
OURS = "jdisagg"
OUR_LOADS = (
    *(Load(running=running) for running in (1, 32, 256, 1024)),
    *(Load(running=256, waiting=waiting) for waiting in (100, 10_000)),
    *(Load(running=256, waiting=waiting, churn=True) for waiting in (0, 100, 10_000)),
)
# nano-vllm admits whatever memory allows, so it has nobody waiting in a pool as large as this one.
SHARED_LOADS = (
    *(Load(running=running) for running in (32, 256, 1024)),
    Load(running=256, churn=True),
    Load(running=256, waiting=10_000),
)
Makers = dict[str, Callable[[Load], Subject]]


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nano-vllm", type=Path, metavar="DIR", help="a checkout of nano-vllm to compare with")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of everything (default 5)")
    parser.add_argument("--quick", action="store_true", help="one run, 32 running at most: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    try:
        makers, notes = subjects(options.nano_vllm)
    except ImportError as error:
        parser.error(f"--nano-vllm: {error}")
    report: dict[str, Any] = {"machine": machine(), "page_size": PAGE_SIZE, "runs": runs, "includes": notes}
    print_head(report)
    report["loads"] = [measure(load, makers, runs) for load in loads(options.quick)]
    report["pages_us"] = spread([pages.page_costs() for _ in range(runs)])
    report["queue_us"] = {n: spread([pages.queue_costs(n) for _ in range(runs)]) for n in (100, 10_000)}
    print_small(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def subjects(nano_folder: Path | None) -> tuple[Makers, dict[str, str]]:
    """Who is measured, ours first; and per name what its figures include, or why it is not there."""
    makers: Makers = {OURS: ours.OurSubject}
    notes = {OURS: ours.INCLUDES}
    if nano_folder is None:
        notes["nano-vllm"] = "left out: no --nano-vllm DIR"
    else:
        makers["nano-vllm"], notes["nano-vllm"] = nano.load_nano(nano_folder), nano.INCLUDES
    try:
        makers["transformers"], notes["transformers"] = hf.load_transformers(), hf.INCLUDES
    except ImportError as error:
        notes["transformers"] = f"left out: {error}"
    return makers, notes


def loads(quick: bool) -> list[Load]:
    """Every load once, those of ours first."""
    if quick:
        return [Load(running=32), Load(running=32, waiting=100, churn=True)]
    return [*OUR_LOADS, *(load for load in SHARED_LOADS if load not in OUR_LOADS)]


def measure(load: Load, makers: Makers, runs: int) -> dict[str, Any]:
    """All subjects under one load, in turns; prints a line for each."""
    shared = load in SHARED_LOADS or load not in OUR_LOADS
    names = [n for n in makers if n == OURS or (shared and not (n == "nano-vllm" and load.waiting))]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            seen[name].append(figures(drive(makers[name], load), load))
    result: dict[str, Any] = {"load": asdict(load), "subjects": {}}
    for name in names:
        figures_of = spread(seen[name])
        ratios = [a["token"] / b["token"] for a, b in zip(seen[name], seen[OURS], strict=True)]
        figures_of["ratio"] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        result["subjects"][name] = figures_of
        print_line(load, name, figures_of)
    return result


def figures(ticks: list[Tick], load: Load) -> dict[str, float]:
    """Microseconds of one run."""
    total = [tick.total_ns / 1e3 for tick in ticks]
    return {
        "p50": statistics.median(total),
        "p99": quantile(total, 0.99),
        "schedule": statistics.median(tick.schedule_ns for tick in ticks) / 1e3,
        "commit": statistics.median(tick.commit_ns for tick in ticks) / 1e3,
        "request": statistics.median(total) / load.running,
        "token": sum(total) / max(1, sum(tick.new_tokens for tick in ticks)),
    }


def spread(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Per figure: median, lowest and highest of the runs."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {n: {"median": statistics.median(c), "low": min(c), "high": max(c)} for n, c in columns.items()}


def print_head(report: dict[str, Any]) -> None:
    """What is measured, where, and the columns."""
    print(one_line(report["machine"]))
    for name, note in report["includes"].items():
        print(f"{name}: {note}")
    print(
        f"\nmicroseconds, median of {report['runs']} runs [lowest-highest]; page size {PAGE_SIZE}; pools never short of memory"
    )
    print(f"targets for {OURS}, steady: {TARGET_PER_REQUEST_US:g} per running request, {TARGET_256_US:g} per step at 256")
    print("/request = step p50 / running; /token = all steps / tokens; ratio = /token against that of jdisagg, run by run")
    columns = f"{'schedule':>9} {'commit':>8} {'/request':>9} {'/token':>7} {'ratio':>18}  target"
    print(f"{'load':34} {'scheduler':12} {'step p50':>18} {'p99':>7} {columns}")


def print_line(load: Load, name: str, of: dict[str, dict[str, float]]) -> None:
    """One subject under one load."""
    mid = {key: figure["median"] for key, figure in of.items()}
    step = f"{mid['p50']:.0f} [{of['p50']['low']:.0f}-{of['p50']['high']:.0f}]"
    ratio = f"{mid['ratio']:.2f} [{of['ratio']['low']:.2f}-{of['ratio']['high']:.2f}]" if name != OURS else ""
    parts = f"{mid['schedule']:9.0f} {mid['commit']:8.0f} {mid['request']:9.2f} {mid['token']:7.2f} {ratio:>18}"
    print(f"{load.name:34} {name:12} {step:>18} {mid['p99']:7.0f} {parts}  {verdict(load, name, mid)}", flush=True)


def verdict(load: Load, name: str, mid: dict[str, float]) -> str:
    """Whether the targets are met where they apply."""
    if name != OURS or load.churn or load.running < 32:
        return ""
    return met(mid["request"] <= TARGET_PER_REQUEST_US and (load.running != 256 or mid["p50"] <= TARGET_256_US))


def print_small(report: dict[str, Any]) -> None:
    """Page and queue operations."""
    print("\npage operation, microseconds per page")
    for name, figure in report["pages_us"].items():
        print(f"  {name:22} {figure['median']:7.3f} [{figure['low']:.3f}-{figure['high']:.3f}]")
    print("\nqueue operation, microseconds per request")
    for waiting, costs in report["queue_us"].items():
        for name, figure in costs.items():
            print(f"  {name:7} {waiting:6} waiting {figure['median']:7.2f} [{figure['low']:.2f}-{figure['high']:.2f}]")


if __name__ == "__main__":
    sys.exit(main())
