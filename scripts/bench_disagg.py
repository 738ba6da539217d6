"""What does disaggregation cost, and what does it buy? A unified worker against 1P+1D on this machine, over gRPC on 127.0.0.1.

    PYTHONPATH=. python scripts/bench_disagg.py [--quick] [--parts first,jitter,turn,mixed,waiting] [--json FILE]

1. First and second token, at concurrency 1. 2. How much of the transfer is hidden behind prefill. 3. Jitter of a stream on D
while KV of others is imported. 4. Bytes of a chat's second turn. 5. Inter-token latency under mixed prompts at a fixed rate.
6. What hand-offs cost that wait for P.
Random weights; equal settings for all workers; P and D have a core each, the unified worker P's core (in part 5 both cores as
well), this client D's core. Everything is compared within one run. Two cores are needed, and nobody else should use them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_kit.machine import go_first, machine, one_line
from bench_kit.model import Prompts
from disagg_bench import first_token, jitter, mixed, second_turn, waiting
from disagg_bench.model import BenchModel
from disagg_bench.overlap import OverlapLog
from disagg_bench.workers import PAGE_SIZE, Workers, started

from jdisagg.core.logs import LEVEL_VARIABLE

_ROOM_TOKENS = 256  # beyond the longest prompt


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long a run takes."""

    lengths: tuple[int, ...]
    num_prompts: int  # per length
    beside_tokens: int  # of the long prompts in parts 3 and 5
    imports: int  # per stream of part 3
    jitter_rounds: int
    mixed_rounds: int
    mixed_seconds: float  # per subject and round
    waiting: tuple[int, ...]  # hand-offs of part 6
    waiting_seconds: float


FULL = Size(
    lengths=(1024, 2048, 4096, 8192),
    num_prompts=15,
    beside_tokens=4096,
    imports=4,
    jitter_rounds=12,
    mixed_rounds=5,
    mixed_seconds=30.0,
    waiting=(10, 100, 300),
    waiting_seconds=10.0,
)
QUICK = Size(
    lengths=(1024, 2048),
    num_prompts=4,
    beside_tokens=2048,
    imports=2,
    jitter_rounds=1,
    mixed_rounds=1,
    mixed_seconds=10.0,
    waiting=(100,),
    waiting_seconds=3.0,
)


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    options = parse()
    size, model = (QUICK if options.quick else FULL), BenchModel(num_layers=options.layers, embed=options.embed)
    if options.prompts:
        size = replace(size, num_prompts=options.prompts)
    os.environ[LEVEL_VARIABLE] = "debug"  # the workers' logs say when each piece travelled
    cores = tuple(options.cores.split(","))
    os.sched_setaffinity(0, {int(cores[1])})
    with tempfile.TemporaryDirectory(prefix="bench_disagg-") as scratch:
        report = run(options, size, model, (cores[0], cores[1]), options.logs or Path(scratch))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line; exits with a usage message when it makes no sense here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short prompts, once: does it work at all")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what to measure (default {','.join(PARTS)})")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--embed", type=int, default=512, help="width of the model, a multiple of 128 (default 512)")
    parser.add_argument("--prompts", type=int, help="prompts per length in parts 1 and 2 (default 15)")
    parser.add_argument("--cores", default="0,1", metavar="P,D", help="one core each for P and D (default 0,1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the workers' logs and schedules there")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {','.join(sorted(unknown))} unknown, wanted some of {','.join(PARTS)}")
    if options.embed % 128 or options.embed < 128:
        parser.error(f"--embed: got {options.embed}, wanted a multiple of 128")
    usable = os.sched_getaffinity(0)
    wanted = options.cores.split(",")
    if len(set(wanted)) != 2 or not all(core.isdecimal() and int(core) in usable for core in wanted):
        parser.error(f"--cores: got {options.cores}, wanted two of {','.join(map(str, sorted(usable)))}")
    return options


def run(options: argparse.Namespace, size: Size, model: BenchModel, cores: tuple[str, str], work: Path) -> dict[str, Any]:
    """Every part that was asked for, printed as it ends."""
    max_model_len = max(size.lengths) + _ROOM_TOKENS
    model.write(work / "model", max_model_len)
    report: dict[str, Any] = {"machine": machine(), "model": vars(model), "parts": {}}
    print(one_line(report["machine"]))
    print(f"model: {model.num_layers} layers, width {model.embed}, {model.kv_bytes_per_token} bytes of KV a token, float32")
    sizes = {"max_model_len": max_model_len, "num_pages": 3 * -(-max_model_len // PAGE_SIZE)}
    began_s = time.monotonic()
    with started(work / "model", work, cores, **sizes, wide="mixed" in options.parts) as workers:
        report["client goes first"] = is_first = go_first()
        print(f"workers ready after {time.monotonic() - began_s:.0f} s; client goes first: {is_first}\n", flush=True)
        for name, measure in PARTS.items():
            if name in options.parts:
                began_s = time.monotonic()
                part, lines = measure(workers, size, model)
                report["parts"][name] = part
                print("\n".join(lines))
                print(f"   ({time.monotonic() - began_s:.0f} s, load average then {os.getloadavg()[0]:.1f})\n", flush=True)
    return report


def measure_first(workers: Workers, size: Size, model: BenchModel) -> tuple[Any, list[str]]:
    """Parts 1 and 2."""
    points = first_token.measure(workers, Prompts(1), size.lengths, size.num_prompts)
    log = OverlapLog(workers.decode_log, workers.prefill_schedule)
    rows = [first_token.summary(point, log) for point in points]
    return rows, first_token.lines(rows)


def measure_jitter(workers: Workers, size: Size, model: BenchModel) -> tuple[Any, list[str]]:
    """Part 3."""
    tokens, max_tokens = size.beside_tokens, max(size.lengths) + _ROOM_TOKENS - jitter.STEADY_PROMPT_TOKENS
    spells = jitter.measure(workers, Prompts(3), tokens, rounds=size.jitter_rounds, imports=size.imports, max_tokens=max_tokens)
    part = jitter.summary(spells, tokens)
    return part, jitter.lines(part)


def measure_turn(workers: Workers, size: Size, model: BenchModel) -> tuple[Any, list[str]]:
    """Part 4."""
    part = second_turn.measure(workers, Prompts(4), model)
    return part, second_turn.lines(part)


def measure_mixed(workers: Workers, size: Size, model: BenchModel) -> tuple[Any, list[str]]:
    """Part 5."""
    prompts, clients = Prompts(5), (workers.unified.client, workers.decode.client)
    short_s, long_s = (
        max(client.run(prompts.next(tokens), 2).first_s for client in clients)
        for tokens in (mixed.SHORT_PROMPT_TOKENS, size.beside_tokens)
    )
    rate = mixed.Rate(
        long_tokens=size.beside_tokens,
        long_every_s=long_s / mixed.LONG_LOAD,
        short_every_s=max(0.25, 5 * short_s),
        seconds=max(size.mixed_seconds, 2 * long_s / mixed.LONG_LOAD),
    )
    part = mixed.summary(mixed.measure(workers, prompts, rate, rounds=size.mixed_rounds), rate)
    return part, mixed.lines(part)


def measure_waiting(workers: Workers, size: Size, model: BenchModel) -> tuple[Any, list[str]]:
    """Part 6: without the workers, which have nothing to do meanwhile."""
    rows = waiting.measure(size.waiting, size.waiting_seconds)
    return rows, waiting.lines(rows)


PARTS = {
    "first": measure_first,
    "jitter": measure_jitter,
    "turn": measure_turn,
    "mixed": measure_mixed,
    "waiting": measure_waiting,
}


if __name__ == "__main__":
    sys.exit(main())
