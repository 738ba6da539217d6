"""Real server processes for end-to-end tests: start, wait for READY, look at them from outside, end them for sure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_kit.samples import samples, total
from chaos_kit.leaks import Held, held_by, left_over
from fleet_process import ROOT, FleetProcess

from jdisagg.serve.environment import PARENT_VARIABLE
from jdisagg.serve.ready import Ready

OURS = ("XLA_FLAGS", "NPROC", PARENT_VARIABLE)  # of tests: an operator has none of them
READY_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0  # beyond --drain-s
ENGINE_ANSWERS_S = 30.0


def environment(**more: str) -> dict[str, str]:
    """Of what an operator starts here, on CPUs."""
    theirs = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**theirs, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}", "JAX_PLATFORMS": "cpu", **more}


def run_script(name: str, *flags: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """One of scripts/, to its end."""
    command = [sys.executable, str(ROOT / "scripts" / name), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=timeout_s, check=False
    )


class ServerProcess:
    """One `python -m jdisagg.serve` with its READY line. Always ended by SIGKILL if nothing else helps."""

    def __init__(self, *flags: str, log: Path, env: dict[str, str] | None = None, module: str = "jdisagg.serve") -> None:
        self.flags = flags
        self.log = log
        as_operators = {"JAX_PLATFORMS": "cpu", **dict.fromkeys(OURS), **(env or {})}
        self._started = FleetProcess(*flags, log=log, env=as_operators, module=module)
        self.process = self._started.process
        self._ready: Ready | None = None
        self._log_size_at_ready = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> Ready:
        assert self._ready is not None, "it was never READY"
        return self._ready

    @property
    def grpc(self) -> str:
        return str(self.ready.grpc)

    @property
    def http(self) -> str:
        return f"http://{self.ready.http}"

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> ServerProcess:
        """Until the READY line; raises with the tail of the log when it does not come."""
        self._ready = self._started.wait_ready(timeout_s)
        self._log_size_at_ready = self.log.stat().st_size
        return self

    def tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:]

    def log_since_ready(self) -> str:
        """What the process has written to stderr since its READY line."""
        with self.log.open("rb") as file:
            file.seek(self._log_size_at_ready)
            return file.read().decode(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, now."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after a grace; returns the exit status."""
        self.process.send_signal(signal.SIGCONT)
        status = self._started.stop(STOP_TIMEOUT_S)
        self._started.close()
        return status

    # --- looking from outside

    def get(self, path: str, timeout_s: float = 30.0) -> tuple[int, str]:
        """HTTP GET: (status, body)."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        """HTTP POST of JSON, or of what should be some: (status, decoded body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of one metric whose labels match."""
        return total(samples(self.get("/metrics")[1]), name, **labels)

    def left_over(self) -> list[str]:
        """What it still holds for somebody; empty when it is at rest."""
        return left_over(samples(self.get("/metrics")[1]), self.state())

    def held(self) -> Held:
        """What the process holds of the system now."""
        return held_by(self.pid)

    def state(self) -> dict[str, Any]:
        """GET /debug/state, again where an engine that waits for a core had not answered."""
        deadline_s = time.monotonic() + ENGINE_ANSWERS_S
        while "error" in (state := self.state_now()) and time.monotonic() < deadline_s:
            pass
        assert "error" not in state, state
        return state

    def state_now(self) -> dict[str, Any]:
        """The same, once; an engine that stands still has an `error` and nothing else."""
        return json.loads(self.get("/debug/state")[1])


def wait_until(condition: Any, timeout_s: float, what: str, found: Callable[[], object] | None = None) -> None:
    """Poll until `condition()` is true; raises with `what`, and what `found()` sees, otherwise. It is asked once more when the
    time is over: this process may have stood still."""
    deadline_s, is_over = time.monotonic() + timeout_s, False
    while not condition():
        if is_over:
            raise AssertionError(f"not within {timeout_s} s: {what}" + (f"; found {found()}" if found else ""))
        time.sleep(0.02)
        is_over = time.monotonic() > deadline_s
