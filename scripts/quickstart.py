"""Starts `serve --role local` on the demo model, streams one request, says where it was computed.

Usage: quickstart.py [--once]. Without --once it keeps serving until Ctrl-C. Logs go to out/quickstart.log.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time

from fleet_process import ROOT, FleetProcess, stream

from jdisagg.core.settings import load_config
from jdisagg.serve.ready import Ready
from jdisagg.v1 import common_pb2, generation_pb2

CONFIG = ROOT / "configs" / "demo-local.toml"
LOG = ROOT / "out" / "quickstart.log"
PROMPT = 'def read_lines(path, encoding=None):\n    """Return the lines of a file."""\n    with open(path'
MAX_TOKENS = 80
TEMPERATURE, SEED = 0.4, 1  # greedy, a model this small repeats itself
READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 120.0


def free(port: int) -> int:
    """The port, or 0 (pick any) when something listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def show(ready: Ready) -> None:
    """What runs, one request, where it was computed."""
    print("\n".join(processes(ready)))
    print(f"ready after {ready.warmup_s:.1f} s; one request ({MAX_TOKENS} tokens, temperature {TEMPERATURE:g}, seed {SEED}):\n")
    sampling = common_pb2.SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=MAX_TOKENS)
    request = generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
    began_s = time.monotonic()
    print(PROMPT, end="", flush=True)
    assert ready.grpc is not None
    complete = stream(ready.grpc, request, REQUEST_TIMEOUT_S, lambda text: print(text, end="", flush=True))
    seconds = time.monotonic() - began_s
    print(f"\n\n{where(complete, ready)}; {complete.usage.completion_tokens} tokens in {seconds:.2f} s")


def processes(ready: Ready) -> list[str]:
    """One line for each: role, pid, and where its gRPC and its metrics are."""
    return [
        f"{process['role']:>8}  pid {process['pid']:<7} grpc {process['grpc']:<16} http://{process['http']}/metrics"
        for process in ready.workers
    ]


def where(complete: generation_pb2.Complete, ready: Ready) -> str:
    """One line: who prefilled, what crossed, who decoded."""
    p = complete.choices[0].provenance
    names = {worker["grpc"]: f"pid {worker['pid']}" for worker in ready.workers}
    prefill, decode = (names.get(worker, worker.split(" @ ")[0]) for worker in (p.prefill_worker, p.decode_worker))
    if not p.prefill_worker:
        return f"prefilled and decoded on D {decode}: {p.prefilled_tokens} tokens, nothing transferred"
    pages = f"{p.transferred_pages} page{'s' if p.transferred_pages > 1 else ''}, " if p.transferred_pages else ""
    return f"prefilled on P {prefill}: {p.transferred_tokens} tokens, {pages}{p.transferred_bytes / 1e6:.1f} MB -> D {decode}"


def example(ready: Ready) -> str:
    """A command that streams from the HTTP edge."""
    body = f'{{"model": "{ready.model}", "prompt": "import os\\n", "max_tokens": 32, "stream": true}}'
    return f"  curl -N http://{ready.http}/v1/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"


def waiting(seconds: float) -> None:
    """A line that counts up, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rloading, compiling, warming up .. {seconds:.0f} s ")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--once", action="store_true", help="end after the request")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = load_config(["--config", str(CONFIG)]).server
    ports = ["--port", str(free(server.port)), "--grpc-port", str(free(server.grpc_port))]
    print(f"starting router, prefill and decode worker; a first start compiles for minutes, see {LOG}", flush=True)
    fleet = FleetProcess("--config", str(CONFIG), *ports, log=LOG)
    try:
        ready = fleet.wait_ready(READY_TIMEOUT_S, waiting)
        show(ready)
        if not options.once:
            print(f"\nserving until Ctrl-C, e.g.\n{example(ready)}", flush=True)
            status = fleet.process.wait()
            print(f"the fleet ended by itself with {status}; see {LOG}")
            return status or 1
    except KeyboardInterrupt:
        print("\nstopping")
    except RuntimeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    finally:
        status = fleet.stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
