"""Workers of a bench: started, READY, asked, and ended together."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet_process import FleetProcess, free_port

from bench_kit.client import Client, read_samples
from bench_kit.machine import cpu_ticks
from bench_kit.samples import by_label, by_name
from jdisagg.serve.ready import Ready

LEAST_S = 5.0  # of a request
ANSWER_S = 60.0  # of /debug/state, on a machine that stands still


@dataclass(kw_only=True)
class Server:
    """One worker that is READY."""

    process: FleetProcess
    ready: Ready
    client: Client

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.process.pid

    def samples(self) -> dict[str, float]:
        """Of /metrics, now."""
        assert self.ready.http is not None
        return read_samples(self.ready.http)

    def counters(self) -> dict[str, float]:
        """Samples by name, labels added up; 0 for names it does not have."""
        return by_name(self.samples())

    def bytes_by_backend(self) -> dict[str, float]:
        """KV bytes received, by the backend that carried them."""
        return by_label(self.samples(), "jdisagg_transfer_bytes_total", "backend")

    def recoveries_by_rung(self) -> dict[str, float]:
        """Hand-offs that did not go as meant, by what was done."""
        return by_label(self.samples(), "jdisagg_recoveries_total", "rung")

    def wait_for_peer(self, within_s: float) -> None:
        """Until this decode worker has found its prefill worker: READY, it may have asked last before the other one was, and
        asks once a second. Raises RuntimeError after `within_s`."""
        end_s = time.monotonic() + within_s
        while "usable" not in (states := by_label(self.samples(), "jdisagg_peers", "state")):
            if time.monotonic() > end_s:
                raise RuntimeError(f"no usable prefill worker after {within_s:g} s: {states}")
            time.sleep(0.05)

    def handoffs(self) -> set[str]:
        """Names of the hand-offs that this decode worker has under way. Raises RuntimeError when its engine does not answer."""
        until_s = time.monotonic() + ANSWER_S
        while True:
            with urllib.request.urlopen(f"http://{self.ready.http}/debug/state", timeout=ANSWER_S) as answer:
                state = json.load(answer)
            if "error" not in state:
                return set(state["handoff"]["handoffs"])
            if time.monotonic() > until_s:
                raise RuntimeError(str(state["error"]))
            time.sleep(0.05)  # its engine waits for a core

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, all threads; what others do on its core shows least in these."""
        return cpu_ticks(self.pid)[1] / os.sysconf("SC_CLK_TCK")


class Servers:
    """Starts workers; `close` ends all of them."""

    def __init__(self, log: Callable[[str], Path], left_s: Callable[[], float], *common: str) -> None:
        """`log`: where a worker of that name logs to. `left_s`: how long it may take until READY, and for a request from then
        on. `common`: flags of all."""
        self._log = log
        self._left_s = left_s
        self._common = common
        self._processes: list[FleetProcess] = []
        self._servers: list[Server] = []

    def launch(self, name: str, *flags: str, env: Mapping[str, str] | None = None) -> tuple[FleetProcess, str]:
        """Start a worker; its gRPC address is known before it is READY, so that others may start beside it."""
        port = free_port()
        process = FleetProcess("--grpc-port", str(port), *self._common, *flags, log=self._log(name), env=env)
        self._processes.append(process)
        return process, f"127.0.0.1:{port}"

    def wait(self, process: FleetProcess) -> Server:
        """Until it is READY. Raises RuntimeError with the end of its log."""
        ready = process.wait_ready(self._left_s())
        assert ready.grpc is not None
        client = Client(ready.grpc, timeout_s=max(LEAST_S, self._left_s()))
        self._servers.append(Server(process=process, ready=ready, client=client))
        return self._servers[-1]

    def close(self) -> None:
        """Kill what still runs."""
        for server in self._servers:
            server.client.close()
        for process in self._processes:
            process.close()
