"""One prompt on two fleets side by side; the right one loses its decode worker by kill -9 in the middle.

Both fleets are a router, a prefill worker and two decode workers on the demo model, `--numerics exact`. On a terminal the two
streams are drawn side by side as they come, else printed line by line. Exits 0 only when both gave the same tokens and the
kill hit the stream. Logs go to out/pull-the-plug-{left,right}.log.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
from fleet_process import ROOT, FleetProcess, stream
from panes import Pane, Panes

from jdisagg.serve.ready import Ready
from jdisagg.v1 import common_pb2, generation_pb2

FLAGS = (
    *("--config", str(ROOT / "configs" / "demo-local.toml"), "--port", "0", "--grpc-port", "0", "--num-decode", "2"),
    *("--numerics", "exact", "--max-model-len", "512", "--max-num-seqs", "4"),
)
PROMPT = 'def read_lines(path, encoding=None):\n    """Return the lines of a file."""\n    with open(path'
KILL_AFTER = 50  # pieces of text
SAMPLING = common_pb2.SamplingParams(temperature=0.6, frequency_penalty=0.3, seed=3, max_tokens=116, ignore_eos=True)
READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 120.0
REDRAW_S = 0.05


class Stream:
    """One request on one fleet, running in a thread. Its text arrives in `pane`."""

    def __init__(self, ready: Ready, pane: Pane, threads: ThreadPoolExecutor) -> None:
        assert ready.grpc is not None
        self.ready = ready
        self.pane = pane
        self.killed_pid: int | None = None
        self.killed_s = 0.0
        self._times_s: list[float] = []
        request = generation_pb2.GenerateRequest(text=PROMPT, sampling=SAMPLING)
        self.result: Future[generation_pb2.Complete] = threads.submit(
            stream, ready.grpc, request, REQUEST_TIMEOUT_S, self._take
        )

    @property
    def num_pieces(self) -> int:
        """Pieces of text so far."""
        return len(self._times_s)

    def gap_ms(self, since_s: float) -> float:
        """The longest the client waited between two pieces, after `since_s` or across it."""
        return 1e3 * max((b - a for a, b in itertools.pairwise(self._times_s) if b > since_s), default=0.0)

    @property
    def decode_worker(self) -> str:
        """Where its last tokens were decoded."""
        return self._name(self.result.result().choices[0].provenance.decode_worker.split(" @ ")[-1])

    @property
    def recoveries(self) -> tuple[str, ...]:
        """What its fleet had to do."""
        return tuple(self.result.result().choices[0].provenance.recoveries)

    def pull_the_plug(self) -> None:
        """kill -9 of the decode worker that serves it now. Raises RuntimeError when it has ended already."""
        with urllib.request.urlopen(f"http://{self.ready.http}/debug/state", timeout=REQUEST_TIMEOUT_S) as answer:
            flights = json.load(answer)["flights"]
        if not flights:
            raise RuntimeError("the stream was over before the kill; nothing is shown by that")
        self.killed_pid = next(int(w["pid"]) for w in self.ready.workers if w["grpc"] == flights[0]["worker"])
        self.killed_s = time.monotonic()
        os.kill(self.killed_pid, signal.SIGKILL)
        self.pane.mark(f"kill -9 {self.killed_pid}")

    def _take(self, text: str) -> None:
        self._times_s.append(time.monotonic())
        self.pane.add(text)

    def _name(self, address: str) -> str:
        return next((f"pid {worker['pid']}" for worker in self.ready.workers if worker["grpc"] == address), address)


def waiting(seconds: float) -> None:
    """A line that counts up, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rstarting two fleets of four processes .. {seconds:.0f} s ")


def settings() -> str:
    """How tokens are drawn."""
    s = SAMPLING
    return f"temperature {s.temperature:g}, frequency penalty {s.frequency_penalty:g}, seed {s.seed}"


def run(left: Stream, right: Stream, show: Callable[[], None]) -> None:
    """Both to their end, the kill in the middle of the right one. Raises RuntimeError, OSError or grpc.RpcError."""
    while not (left.result.done() and right.result.done()):
        if right.killed_pid is None and right.num_pieces >= KILL_AFTER:
            right.pull_the_plug()
        show()
        time.sleep(REDRAW_S)
    show()
    for one in (left, right):
        one.result.result()


def verdict(left: Stream, right: Stream) -> bool:
    """Print what happened; whether both are identical and the kill was felt."""
    a, b = (one.result.result().choices[0] for one in (left, right))
    same = (a.text, list(a.token_ids), a.finish) == (b.text, list(b.token_ids), b.finish)
    calm_ms, gap_ms = (one.gap_ms(right.killed_s) for one in (left, right))
    calm = f"longest gap from then on {calm_ms:.0f} ms" if calm_ms else "it had ended before the kill"
    print(f"left : {len(a.token_ids)} tokens, undisturbed; {calm}")
    print(f"right: {len(b.token_ids)} tokens, D pid {right.killed_pid} killed; gap {gap_ms:.0f} ms")
    print(f"       it went on at D {right.decode_worker} ({', '.join(right.recoveries) or 'nothing noticed'})")
    print(f"identical: {'yes' if same else 'NO'}")
    return same and "replay" in right.recoveries


def main() -> int:
    """Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_s = time.monotonic()
    fleets = [FleetProcess(*FLAGS, log=ROOT / "out" / f"pull-the-plug-{name}.log") for name in ("left", "right")]
    try:
        ready = [fleet.wait_ready(READY_TIMEOUT_S, waiting) for fleet in fleets]
        print(f"ready after {time.monotonic() - began_s:.0f} s; {settings()}; prompt:\n\n{PROMPT}\n")
        print("one stream on each of two fleets; in the middle: kill -9 of D on the right\n")
        panes = Panes(("left: undisturbed", "right: loses its D"), shutil.get_terminal_size().columns, sys.stdout)
        with ThreadPoolExecutor(2) as threads:
            left, right = (Stream(one, pane, threads) for one, pane in zip(ready, panes.panes, strict=True))
            run(left, right, panes.show)
        panes.close()
        return 0 if verdict(left, right) else 1
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, grpc.RpcError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    finally:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(FleetProcess.stop, fleets))


if __name__ == "__main__":
    sys.exit(main())
