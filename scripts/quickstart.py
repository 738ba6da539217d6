"""Starts `serve --role local` on the demo model, streams one request, says where it was computed.

Usage: quickstart.py [--once]. Without --once it keeps serving until Ctrl-C. Logs go to out/quickstart.log.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from jdisagg.api.channels import open_blocking_channel
from jdisagg.core.settings import load_config
from jdisagg.serve.environment import PARENT_VARIABLE
from jdisagg.serve.ready import Ready, parse
from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "demo-local.toml"
LOG = ROOT / "out" / "quickstart.log"
PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 48
READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0


def start() -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own; it ends when this process does."""
    LOG.parent.mkdir(exist_ok=True)
    server = load_config(["--config", str(CONFIG)]).server
    ports = ["--port", str(free(server.port)), "--grpc-port", str(free(server.grpc_port))]
    with LOG.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jdisagg.serve", "--config", str(CONFIG), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )


def free(port: int) -> int:
    """The port, or 0 (pick any) when something listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def wait_ready(process: subprocess.Popen[bytes]) -> Ready:
    """The READY line; exits with the end of the log when it does not come."""
    assert process.stdout is not None
    began_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (seconds := time.monotonic() - began_s) < READY_TIMEOUT_S and process.poll() is None:
            if sys.stderr.isatty():
                sys.stderr.write(f"\rloading, compiling, warming up .. {seconds:.0f} s")
            if selector.select(timeout=1.0) and (ready := parse(process.stdout.readline().decode())) is not None:
                if sys.stderr.isatty():
                    sys.stderr.write("\r\033[K")
                return ready
    tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-20:])
    sys.exit(f"the fleet did not get ready (exit status {process.poll()}); the end of {LOG}:\n{tail}")


def stream(address: str) -> generation_pb2.Complete:
    """Print the answer of one request as it comes; returns the closing message."""
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    request = generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling)
    sys.stdout.write(PROMPT)
    with open_blocking_channel(address) as channel:
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=REQUEST_TIMEOUT_S):
            if response.HasField("complete"):
                sys.stdout.write("\n")
                return response.complete
            sys.stdout.write(response.delta.text)
            sys.stdout.flush()
    sys.exit("the stream ended without its closing message")


def where(complete: generation_pb2.Complete) -> str:
    """One line: who prefilled, what crossed, who decoded."""
    p = complete.choices[0].provenance
    if not p.prefill_worker:
        return f"prefilled and decoded on {p.decode_worker}: {p.prefilled_tokens} tokens, nothing transferred"
    prefill, decode = p.prefill_worker.split(" @ ")[0], p.decode_worker.split(" @ ")[0]
    return (
        f"prefilled on P {prefill}: {p.transferred_tokens} tokens, {p.transferred_pages} pages, "
        f"{p.transferred_bytes / 2**20:.1f} MB -> D {decode}"
    )


def show(ready: Ready) -> None:
    """What runs, one request, where it was computed, what to try next."""
    for worker in ready.workers:
        print(f"{worker['role']:>8}  pid {worker['pid']:<7} grpc {worker['grpc']}")
    assert ready.grpc is not None
    began_s = time.monotonic()
    print(f"ready after {ready.warmup_s:.1f} s; one request ({MAX_TOKENS} tokens, greedy):\n")
    complete = stream(ready.grpc)
    tokens = complete.usage.completion_tokens
    print(f"\n{where(complete)}; {tokens} tokens in {time.monotonic() - began_s:.2f} s")


def example(ready: Ready) -> str:
    """A command that streams from the HTTP edge."""
    body = f'{{"model": "{ready.model}", "prompt": "import os\\n", "max_tokens": 32, "stream": true}}'
    return f"  curl -N http://{ready.http}/v1/completions -H 'Content-Type: application/json' \\\n    -d '{body}'"


def stop(process: subprocess.Popen[bytes]) -> int:
    """End the fleet; its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--once", action="store_true", help="end after the request")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = start()
    try:
        ready = wait_ready(process)
        show(ready)
        if not options.once:
            print(f"\nserving until Ctrl-C, e.g.\n{example(ready)}", flush=True)
            status = process.wait()
            print(f"the fleet ended by itself with {status}; see {LOG}")
            return status or 1
    except KeyboardInterrupt:
        print("\nstopping")
    finally:
        status = stop(process)
    return status


if __name__ == "__main__":
    sys.exit(main())
