"""What does a streamed token cost a router? CPU time of its process, from a worker's message to the client's socket.

    PYTHONPATH=. python scripts/bench_stream.py [--runs 5] [--streams 64,256] [--kinds chat,grpc] [--quick] [--json FILE]

A real router with the demo model's tokenizer, a worker that makes tokens up, and clients, each in a process of its own. For
every kind of client: CPU microseconds per token of the router and of the worker at a rate that is far from saturation, so that
every token is a chunk of its own; beside it, in the same run, those of the libraries alone (uvicorn, grpc.aio), which write a
chunk of the same bytes at the same rate; gaps between the chunks of a stream when one core is half busy; and what comes through
when the worker makes far more than the router can pass on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_kit.child import START_S, Child, child
from bench_kit.figures import spread
from bench_kit.machine import machine, one_line
from fleet_process import FleetProcess
from stream_bench.bare import serve_bare
from stream_bench.client import run_client
from stream_bench.parts import DEAD_AFTER_S, HOST, KINDS, MODEL, Kind, Phase, Seen
from stream_bench.worker import serve_worker

FLOOD_PER_S = 60_000  # tokens, more than any router passes on one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Everything that runs."""

    router_pid: int
    router: dict[str, str]  # address by protocol
    worker: Child
    bare: Child
    bare_at: dict[str, str]
    client: Child
    window_s: float

    def look(self, kind: Kind, num_streams: int, rate: float) -> Seen:
        """Streams through the router at so many tokens a second, all together."""
        self.worker.ask(num_streams / rate)
        return self._look(kind, num_streams, self.router, (self.router_pid, self.worker.pid), checks_text=True)

    def look_bare(self, kind: Kind, num_streams: int, rate: float, chunk: bytes) -> Seen:
        """The same chunk, from the libraries alone."""
        self.bare.ask((num_streams / rate, chunk))
        return self._look(kind, num_streams, self.bare_at, (self.bare.pid,), checks_text=False)

    def _look(self, kind: Kind, num_streams: int, at: dict[str, str], pids: tuple[int, ...], *, checks_text: bool) -> Seen:
        phase = Phase(
            kind=kind,
            address=at["grpc" if kind.api == "grpc" else "http"],
            num_streams=num_streams,
            window_s=self.window_s,
            pids=pids,
            checks_text=checks_text,
        )
        return self.client.ask(phase)


def main() -> int:
    """Returns 0: this measures, it does not judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="looks at the cost of each kind (default 5)")
    parser.add_argument("--streams", default="64,256", help="how many at once (default 64,256)")
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS), help="which clients (default: all)")
    parser.add_argument("--rate", type=int, default=2000, help="tokens a second where cost is measured (default 2000)")
    parser.add_argument("--window-s", type=float, default=2.0, help="length of each look (default 2)")
    parser.add_argument("--cost-only", action="store_true", help="leave out gaps and flood, which want a quiet machine")
    parser.add_argument("--quick", action="store_true", help="one look of a second at 16 streams: does it work at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.streams, options.window_s = 1, "16", 1.0
    kinds = [kind for kind in KINDS if kind.name in options.kinds.split(",")]
    report: dict[str, Any] = {"machine": machine(), "rate": options.rate, "runs": options.runs, "rows": []}
    print(one_line(report["machine"]))
    print(f"CPU us per token at {options.rate} tokens/s, median [lowest to highest] of {options.runs};", end="")
    print(" /s of a core = 1e6 / router")
    head = f"{'':>21} {'streams':>7} {'router':>14} {'bare':>12} {'ratio':>6} {'worker':>7} {'/s of a core':>12}"
    print(head + ("" if options.cost_only else f" {'gap ms at half of it; bare':>28} {'flooded':>24}"), flush=True)
    with started(options.window_s) as bench:
        for num_streams in map(int, options.streams.split(",")):
            for kind in kinds:
                report["rows"].append(row := cost(bench, kind, num_streams, options.rate, options.runs))
                if not options.cost_only:
                    row |= load(bench, kind, num_streams, row)
                print(flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


@contextmanager
def started(window_s: float) -> Iterator[Bench]:
    """Every process, ended with it."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-stream-")))
        flags = ("--role", "router", "--model", MODEL, "--host", HOST, "--port", "0", "--grpc-port", "0", "--drain-s", "1")
        flags += ("--dead-after-s", str(DEAD_AFTER_S))
        process = FleetProcess(*flags, log=logs / "router.log")
        stack.callback(process.close)
        ready = process.wait_ready(START_S)
        worker, _ = stack.enter_context(child(serve_worker, ready.grpc))
        bare, (bare_http, bare_grpc) = stack.enter_context(child(serve_bare))
        client, _ = stack.enter_context(child(run_client))
        yield Bench(
            router_pid=ready.pid,
            router={"http": ready.http or "", "grpc": ready.grpc or ""},
            worker=worker,
            bare=bare,
            bare_at={"http": bare_http, "grpc": bare_grpc},
            client=client,
            window_s=window_s,
        )


def cost(bench: Bench, kind: Kind, num_streams: int, rate: int, runs: int) -> dict[str, Any]:
    """CPU time per token, ours and the libraries' in turns; prints it."""
    ours, bare = list[Seen](), list[Seen]()
    for _ in range(runs):
        ours.append(bench.look(kind, num_streams, rate))
        bare.append(bench.look_bare(kind, num_streams, rate, ours[-1].sample))
    row: dict[str, Any] = {"kind": kind.name, "streams": num_streams, "chunk": ours[0].sample.decode("latin-1")}
    row |= {"router_us": [seen.cpu_us(0) for seen in ours], "worker_us": [seen.cpu_us(1) for seen in ours]}
    row |= {"bare_us": [seen.cpu_us(0) for seen in bare], "bytes_per_chunk": ours[0].num_bytes / ours[0].num_chunks}
    row |= {"tokens_per_chunk": sum(seen.num_tokens for seen in ours) / sum(seen.num_chunks for seen in ours)}
    router, base = statistics.median(row["router_us"]), statistics.median(row["bare_us"])
    row |= {"ratio": router / base, "tokens_per_core_s": 1e6 / router}
    ours_us, bare_us = (spread(row[name], ".0f") for name in ("router_us", "bare_us"))
    shown = f"{kind.name:>21} {num_streams:>7} {ours_us:>14} {bare_us:>12} {router / base:>6.1f}"
    print(f"{shown} {statistics.median(row['worker_us']):>7.1f} {1e6 / router:>12,.0f}", end="", flush=True)
    return row


def load(bench: Bench, kind: Kind, num_streams: int, row: dict[str, Any]) -> dict[str, Any]:
    """What clients feel where one core is half busy with their tokens, and what comes through a flood; prints it."""
    half = row["tokens_per_core_s"] / 2
    paced = bench.look(kind, num_streams, half)
    beside = bench.look_bare(kind, num_streams, half, paced.sample)
    flood = bench.look(kind, num_streams, FLOOD_PER_S)
    gaps = f"p50 {1e3 * paced.gap_p50_s:.0f} p99 {1e3 * paced.gap_p99_s:.0f}; {1e3 * beside.gap_p99_s:.0f}"
    print(f" {gaps:>28} {flood.tokens_per_s:>9,.0f}/s, {flood.num_tokens / flood.num_chunks:.1f} a chunk", end="")
    return {
        "half_tokens_per_s": half,
        "step_ms": 1e3 * num_streams / half,
        "gap_ms": {"p50": 1e3 * paced.gap_p50_s, "p99": 1e3 * paced.gap_p99_s, "bare p99": 1e3 * beside.gap_p99_s},
        "flood": {"tokens_per_s": flood.tokens_per_s, "chunks_per_s": flood.num_chunks / flood.seconds, "us": flood.cpu_us(0)},
    }


if __name__ == "__main__":
    sys.exit(main())
