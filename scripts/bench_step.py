"""How fast is one decode step of the engine on this machine's CPU, and how near to what the machine allows?

    PYTHONPATH=. JAX_PLATFORMS=cpu python scripts/bench_step.py [--rounds 5] [--quick] [--json FILE]

A Llama of 12 layers and about 110 M random parameters, every sequence --context tokens long. In turns within one run, in
float32 and bfloat16: the engine's own step (layers unrolled, the kernels and cache order the platform gets), and two textbook
steps, `lax.scan` over stacked layers with the whole page table gathered and plain attention. "scanned" is the usual one: each
layer's cache goes into the scan and comes out. "carried" has the whole cache in the loop's carry, where it stays in place,
as the engine does it with `--layer-loop scan`. All keep their state on the device, donate it and sample greedily.

The roofline is the longer of two times: weights and visible KV over the memory's rate, products over the rate of a large square
product in the step's dtype; both rates are measured in the same run. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from bench_kit.machine import machine, one_line
from bench_kit.roofline import matmul_flop_per_s, read_bytes_per_s
from step_bench.subject import WARM_STEPS, Form, Subject

DTYPES = ("float32", "bfloat16")
TARGET_RATIO = 3.0
MEMORY_BYTES = 2**29  # past every cache
SIDE, RATE_ROUNDS = 2048, 3


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,2,8,32", help="sequences per step (default 1,2,8,32)")
    parser.add_argument("--context", type=int, default=512, help="tokens per sequence (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--steps", type=int, default=6, help="steps per turn (default 6)")
    parser.add_argument("--quick", action="store_true", help="one turn of one step, batch 2: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.rounds, options.steps, options.context = "2", 1, 1, 32
    report: dict[str, Any] = {"machine": machine(), "context": options.context}
    print(one_line(report["machine"]))
    rates = {"memory": max(read_bytes_per_s(MEMORY_BYTES, repeats=RATE_ROUNDS))}
    rates |= {dtype: max(matmul_flop_per_s(SIDE, repeats=RATE_ROUNDS, dtype=dtype, at_once=1)) for dtype in DTYPES}
    print(
        f"memory {rates['memory'] / 1e9:.1f} GB/s, products " + ", ".join(f"{d} {rates[d] / 1e9:.0f} GFLOP/s" for d in DTYPES)
    )
    print(
        f"{'batch':>5} {'dtype':>9} {'engine ms':>10} {'scanned ms':>11} {'carried ms':>11} {'scanned/engine':>15} "
        f"{'carried/engine':>15} {'roofline ms':>12} {'reached':>8}   (target at batch 32: {TARGET_RATIO:g} x)"
    )
    rows = [row for batch in map(int, options.batches.split(",")) for row in bench(batch, options, rates)]
    for batch in {row["batch"] for row in rows if row["batch"] > 1}:
        wide, narrow = (next(r["engine_ms"] for r in rows if (r["batch"], r["dtype"]) == (batch, d)) for d in DTYPES)
        print(f"batch {batch}: bfloat16 is {wide / narrow:.2f} x as fast as float32")
    if options.json:
        options.json.write_text(json.dumps(report | {"rates": rates, "rows": rows}, indent=1) + "\n")
    return 0


def bench(batch: int, options: argparse.Namespace, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Both dtypes at one batch size; everything takes turns."""
    room = WARM_STEPS + options.rounds * options.steps
    keys = list(itertools.product(DTYPES, Form))
    subjects = {(dtype, form): Subject(form, dtype, batch, options.context, room) for dtype, form in keys}
    for subject in subjects.values():
        subject.time_steps(WARM_STEPS)
    taken: dict[tuple[str, Form], list[float]] = {key: [] for key in keys}
    for _ in range(options.rounds):
        for key in keys:
            taken[key].append(subjects[key].time_steps(options.steps))
    rows = []
    for dtype in DTYPES:
        work = subjects[dtype, Form.ENGINE].work
        step_ms = {form: 1e3 * statistics.median(taken[dtype, form]) for form in Form}
        engine_ms, bound_ms = step_ms[Form.ENGINE], 1e3 * max(work.num_bytes / rates["memory"], work.flops / rates[dtype])
        ratios = {form: step_ms[form] / engine_ms for form in (Form.SCANNED, Form.CARRIED)}
        rows.append(
            {
                "batch": batch,
                "dtype": dtype,
                **{f"{form}_ms": step_ms[form] for form in Form},
                **{f"{form}_ratio": ratio for form, ratio in ratios.items()},
                "roofline_ms": bound_ms,
                "reached": bound_ms / engine_ms,
            }
        )
        print(
            f"{batch:>5} {dtype:>9} {engine_ms:>10.1f} {step_ms[Form.SCANNED]:>11.1f} {step_ms[Form.CARRIED]:>11.1f} "
            f"{ratios[Form.SCANNED]:>15.2f} {ratios[Form.CARRIED]:>15.2f} {bound_ms:>12.1f} {bound_ms / engine_ms:>8.0%}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
