"""How fast do transfer backends move KV between two processes of this machine, and at what cost?

    PYTHONPATH=. JAX_PLATFORMS=cpu python scripts/bench_transfer.py [--runs 5] [--quick] [--json FILE]

1. Totals of 64 KiB to 1 GiB in pieces of --piece-mib, --window of them published ahead, over a real hand-off stream: from Open
   to the last piece confirmed on D's device. Beside them, in the same run and in turns, a plain TCP socket (received into fresh
   buffers), a copy within one process, and what the libraries below grpc and jax give with nothing of ours around them (bare).
   CPU seconds are those of both processes, all threads.
2. The control path: Open to the announcement of a 64 KiB piece that P has at hand. 3. Checksums on against off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import jax
from bench_kit.figures import quantile, spread
from bench_kit.machine import machine, one_line
from transfer_bench.bare import BareGrpc, BareJax, RawTcp, memcpy
from transfer_bench.consumer import Moved, connected
from transfer_bench.parts import BUFFER_BYTES, TOKEN_BYTES, Form

from jdisagg.handoff.credit import WINDOW_PIECES
from jdisagg.serve.environment import keep_freed_memory

BACKENDS = ("grpc", "tcp", "shm", "jax")
BARE = {"grpc": BareGrpc, "jax": BareJax}
TOTALS = tuple(2**power for power in (16, 20, 24, 28, 30))
ROUND_TRIPS = 200
TARGET_CONTROL_MS = 3.0


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="repetitions of everything (default 5)")
    parser.add_argument(
        "--piece-mib",
        type=int,
        default=32,
        help="size of a piece (default 32: 256 tokens of an 8B model with 8 KV heads, bfloat16)",
    )
    parser.add_argument("--backends", default=",".join(BACKENDS), help="which ones")
    parser.add_argument("--quick", action="store_true", help="one run, 16 MiB at most: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    parser.add_argument("--window", type=int, default=WINDOW_PIECES, help="pieces published ahead (default %(default)s)")
    options = parser.parse_args()
    if not 1 <= options.window <= (most := BUFFER_BYTES // (options.piece_mib * 2**20)):
        parser.error(f"--window: got {options.window}, wanted 1 to {most}: no more pieces of that size fit the buffer")
    keep_freed_memory(os.environ)  # as a worker does; the plain socket's receiver has it as well
    runs, totals = (1, TOTALS[:3]) if options.quick else (options.runs, TOTALS)
    report: dict[str, Any] = {
        "machine": machine() | {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "piece_bytes": options.piece_mib * 2**20,
        "runs": runs,
        "rows": [],
    }
    print(f"{one_line(report['machine'])}\npieces of {options.piece_mib} MiB, {runs} runs: median [lowest to highest]\n")
    print(f"{'':>14} {'total':>9} {'GB/s':>22} {'CPU s/GB':>22} {'of which P':>10} {'of TCP/s':>9} {'of TCP/core-s':>13}")
    for total in totals:
        size = min(options.piece_mib * 2**20, total)
        shape = {"tokens": size // TOKEN_BYTES, "window": options.window}
        forms = [Form(backend=name, checksums=on, **shape) for name in options.backends.split(",") for on in (True, False)]
        bench_total(total, size, runs, forms, report["rows"])
    print(f"\ncontrol path, Open to ChunkReady, {ROUND_TRIPS} times (target: p50 below {TARGET_CONTROL_MS:g} ms)")
    report["control_ms"] = {name: control(name) for name in options.backends.split(",")}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def bench_total(total: int, size: int, runs: int, forms: list[Form], rows: list[dict[str, Any]]) -> None:
    """One block of the table, in pieces of `size` bytes; everything takes turns, run by run."""
    count = total // size
    tcp = RawTcp(size)
    moved: dict[str, list[Moved]] = {"TCP": [], "memcpy": []}
    tcp.move(count)
    for _ in range(runs):
        moved["TCP"].append(tcp.move(count))
        moved["memcpy"].append(memcpy(size, count))
    for form in forms:
        name = form.backend + ("" if form.checksums else " unsummed")
        moved[name] = []
        with connected(form) as consumer:
            consumer.move(max(1, min(count, 16)))  # connections, allocators
            for _ in range(runs):
                moved[name].append(consumer.move(count))
                moved["TCP"].append(tcp.move(count))
    for library in (name for name in BARE if name in {form.backend for form in forms}):
        bare = BARE[library](size)
        bare.move(max(1, min(count, 16)))
        moved[f"bare {library}"] = [bare.move(count) for _ in range(runs)]
        moved["TCP"] += [tcp.move(count) for _ in range(runs)]
        bare.close()
    tcp.close()
    base = moved["TCP"]
    for name, measured in moved.items():
        rows.append(row := figures(name, total, measured, base))
        rate, cost = spread(row["gb_per_s"], ".2f"), spread(row["cpu_s_per_gb"], ".2f")
        share = f"{row['of_tcp_rate']:>8.0%} {row['of_tcp_per_core_s']:>13.0%}"
        print(f"{name:>14} {words(total):>9} {rate:>22} {cost:>22} {row['cpu_share_of_p']:>10.0%} {share}", flush=True)


def figures(name: str, total: int, measured: list[Moved], base: list[Moved]) -> dict[str, Any]:
    """One row."""
    rates = [one.num_bytes / one.seconds / 1e9 for one in measured]
    costs = [(one.cpu_p_s + one.cpu_d_s) / one.num_bytes * 1e9 for one in measured]
    base_rate = statistics.median(one.num_bytes / one.seconds / 1e9 for one in base)
    base_cost = statistics.median((one.cpu_p_s + one.cpu_d_s) / one.num_bytes * 1e9 for one in base)
    all_cpu_s = sum(one.cpu_p_s + one.cpu_d_s for one in measured)
    return {
        "name": name,
        "total_bytes": total,
        "gb_per_s": rates,
        "cpu_s_per_gb": costs,
        "cpu_share_of_p": sum(one.cpu_p_s for one in measured) / all_cpu_s if all_cpu_s else 0.0,
        "of_tcp_rate": statistics.median(rates) / base_rate,
        "of_tcp_per_core_s": base_cost / statistics.median(costs) if statistics.median(costs) else 0.0,
    }


def control(backend: str) -> dict[str, float]:
    """Milliseconds."""
    with connected(Form(backend=backend, tokens=1, checksums=True)) as consumer:
        consumer.first_chunk_s()
        times_ms = [1e3 * consumer.first_chunk_s() for _ in range(ROUND_TRIPS)]
    found = {"p50": quantile(times_ms, 0.5), "p99": quantile(times_ms, 0.99), "max": max(times_ms)}
    print(f"{backend:>14} p50 {found['p50']:.2f} ms, p99 {found['p99']:.2f} ms, max {found['max']:.2f} ms", flush=True)
    return found


def words(num_bytes: int) -> str:
    """64 KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes // 1024} KiB"


if __name__ == "__main__":
    raise SystemExit(main())
