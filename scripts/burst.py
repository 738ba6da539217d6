"""Everybody at once: many clients call a fresh fleet over HTTP in the same moment. Each has to get its whole answer.

    PYTHONPATH=. python scripts/burst.py [--requests 1000] [--p 1] [--d 2] [--json FILE] [flags of every worker]

A router, P and D of the demo model on this machine, each call a connection and a stream of its own. Printed: how the calls
ended, when first tokens came, and whether a process was taken for dead, which a burst is no reason for. Exit status 1 when a
call failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from bench_kit.client import read_samples
from bench_kit.samples import by_label
from fleet_process import FleetProcess, free_port

READY_TIMEOUT_S, CALL_TIMEOUT_S = 240.0, 300.0
PROMPT_WORDS, MAX_TOKENS = 14, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How one call ended. `failure` is empty after a whole answer."""

    first_s: float | None
    failure: str


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="calls at once (default 1000)")
    parser.add_argument("--p", type=int, default=1, help="prefill workers (default 1)")
    parser.add_argument("--d", type=int, default=2, help="decode workers (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options, of_workers = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="burst-") as logs:
        figures = run(options.requests, options.p, options.d, ("--max-num-seqs", "64", *of_workers), Path(logs))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0 if figures["well"] == figures["requests"] else 1


def run(num_requests: int, num_p: int, num_d: int, of_workers: tuple[str, ...], logs: Path) -> dict[str, Any]:
    """Start the fleet, call, and end it; the figures."""
    fleet = [f"prefill-{number}" for number in range(num_p)] + [f"decode-{number}" for number in range(num_d)]
    port, grpc_port = free_port(), free_port()
    flags: dict[str, tuple[str, ...]] = {"router": ("--role", "router", "--port", str(port), "--grpc-port", str(grpc_port))}
    for name in fleet:
        flags[name] = ("--role", name.partition("-")[0], "--router", f"127.0.0.1:{grpc_port}", *of_workers)
    processes = {name: FleetProcess(*of_it, log=logs / f"{name}.log") for name, of_it in flags.items()}
    try:
        ready = {name: process.wait_ready(READY_TIMEOUT_S) for name, process in processes.items()}
        asyncio.run(_paired(port))
        began_s = monotonic()
        calls = asyncio.run(_all_at_once(port, num_requests))
        seconds = monotonic() - began_s
        rungs: Counter[str] = Counter()
        for one in ready.values():
            found = by_label(read_samples(one.http or ""), "jdisagg_recoveries_total", "rung")
            rungs.update({rung: int(count) for rung, count in found.items()})
        lost = sum(" is lost: " in line for line in (logs / "router.log").read_text(errors="replace").splitlines())
    finally:
        for process in reversed(processes.values()):
            process.stop()
    return _figures(calls, seconds) | {"taken for dead": lost, "recoveries": dict(rungs)}


async def _paired(port: int) -> None:
    """Wait until the router has a worker for requests."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await _call(port, "a", 1)).failure:
            await asyncio.sleep(0.5)


async def _all_at_once(port: int, num_requests: int) -> list[Call]:
    rng = random.Random(1)
    prompts = [" ".join(f"x{rng.randrange(10**6)}" for _ in range(PROMPT_WORDS)) for _ in range(num_requests)]
    return await asyncio.gather(*(_call(port, prompt, MAX_TOKENS) for prompt in prompts))


async def _call(port: int, prompt: str, max_tokens: int) -> Call:
    """One call over a connection of its own."""
    began_s, first_s, num_tokens = monotonic(), None, 0
    wanted = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    body = json.dumps({**wanted, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: burst\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            status = (await reader.readline()).decode().strip()
            whole = False
            while line := await reader.readline():
                if line.startswith(b'data: {"error"'):
                    return Call(first_s=first_s, failure=line.decode().strip())
                if line.startswith(b"data: {"):
                    first_s = first_s or monotonic() - began_s
                    num_tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", num_tokens)
                whole = whole or line.startswith(b"data: [DONE]")
            writer.close()
    except (OSError, TimeoutError) as error:
        return Call(first_s=first_s, failure=repr(error))
    if whole and num_tokens != max_tokens:
        return Call(first_s=first_s, failure=f"{num_tokens} tokens, wanted {max_tokens}")
    return Call(first_s=first_s, failure="" if whole else status or "the connection ended")


def _figures(calls: list[Call], seconds: float) -> dict[str, Any]:
    first_s = [call.first_s for call in calls if call.first_s is not None]
    failures = Counter(call.failure for call in calls if call.failure)
    return {
        "requests": len(calls),
        "well": sum(not call.failure for call in calls),
        "failures": dict(failures.most_common(3)),
        "seconds": round(seconds, 1),
        "first token s, median and last": [round(statistics.median(first_s), 2), round(max(first_s), 2)] if first_s else None,
    }


if __name__ == "__main__":
    sys.exit(main())
