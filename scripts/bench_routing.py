"""How much of its prompts does a fleet find in its caches, and how long do requests wait? The router's decisions over workers
in simulated time: no clock, no jax, the same figures on every machine.

    PYTHONPATH=. python scripts/bench_routing.py [--prefill 4] [--decode 4] [--slow 1] [--cache-tokens 120000] [--rate 1.0]
        [--runs 3]

cached: prompt tokens that P need not compute; ideal: the same with one cache without end, which has no answers in it, as those
of D have. busy: mean share of its time that P computes (above 1: the queue grows while requests come). max/mean: the busiest P.
wait: until P begins; TTFT: until the first token. Medians over the runs, each of other prompts, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from random import Random
from typing import Any

from bench_kit.figures import spread
from bench_kit.machine import machine, one_line
from route_bench.loads import LOADS, Load
from route_bench.workers import Simulation

from jdisagg.core.requests import Role

COLUMNS = {
    "ideal": "%",
    "cached": "%",
    "busy": "",
    "max/mean": "",
    "wait": "ms",
    "TTFT": "ms",
    "TTFT p95": "ms",
    "TTFT p99": "ms",
}


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=4, help="prefill workers (default 4)")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as long the first P takes (default 1)")
    parser.add_argument("--decode", type=int, default=4, help="decode workers (default 4)")
    parser.add_argument(
        "--cache-tokens", type=int, default=120_000, help="that each worker caches, unless the load says (default 120000)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="1: with ideal caches P would be busy for 3/4 of the time, or near it"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each load (default 3)")
    parser.add_argument("--only", nargs="*", metavar="LOAD", help="some of: " + ", ".join(load.name for load in LOADS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "loads": {}}
    print(one_line(report["machine"]))
    print(f"{options.prefill} P + {options.decode} D, {options.cache_tokens} tokens cached each, rate {options.rate:g}")
    print(f"{'load':16}" + "".join(f"{f'{name} {unit}':>23}" for name, unit in COLUMNS.items()))
    for load in LOADS:
        if not options.only or load.name in options.only:
            runs = report["loads"][load.name] = [measure(load, options, run) for run in range(options.runs)]
            print(f"{load.name:16}" + "".join(f"{_spread(runs, name):>23}" for name in COLUMNS), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def measure(load: Load, options: argparse.Namespace, run: int) -> dict[str, float]:
    """One run."""
    simulation = Simulation(options.prefill, options.decode, load.cache_tokens or options.cache_tokens, slow=options.slow)
    load.start(simulation, Random(run), load.per_s * options.rate * (options.prefill - 1 + 1 / options.slow))
    simulation.run()
    jobs, workers = simulation.done, simulation.workers.values()
    num_tokens, last_s = sum(len(job.prompt) for job in jobs), max(job.arrived_s for job in jobs)
    busy = [worker.busy_s / last_s for worker in workers if worker.entry.member.role is Role.PREFILL]
    ttft_s = sorted(job.ttft_s for job in jobs)
    return {
        "ideal": 100 * sum(job.ideal for job in jobs) / num_tokens,
        "cached": 100 * sum(job.cached for job in jobs) / num_tokens,
        "busy": statistics.fmean(busy),
        "max/mean": max(busy) / statistics.fmean(busy),
        "wait": 1e3 * statistics.fmean(job.wait_s for job in jobs),
        "TTFT": 1e3 * statistics.fmean(ttft_s),
        "TTFT p95": 1e3 * ttft_s[int(0.95 * (len(ttft_s) - 1))],
        "TTFT p99": 1e3 * ttft_s[int(0.99 * (len(ttft_s) - 1))],
    }


def _spread(runs: list[dict[str, float]], name: str) -> str:
    digits = 2 if name in ("busy", "max/mean") else 1 if COLUMNS[name] == "%" else 0
    return spread([run[name] for run in runs], f".{digits}f")


if __name__ == "__main__":
    sys.exit(main())
