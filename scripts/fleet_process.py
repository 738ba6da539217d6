"""A `python -m jdisagg.serve` for scripts and tests: start it, wait for READY, stream from it, end it."""

from __future__ import annotations

import atexit
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jdisagg.api.channels import open_blocking_channel
from jdisagg.serve.environment import PARENT_VARIABLE
from jdisagg.serve.ready import Ready, parse
from jdisagg.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 45.0
HOST = "127.0.0.1"
PORTS = range(16_000, 32_000)  # below those that most systems give to connections
_held: dict[int, socket.socket] = {}


class FleetProcess:
    """The process, in a group of its own; it ends when this one does, or the thread that started it, however that ends. Logs go
    to `log`.

    No session of its own: Linux shares the cores between sessions first (sched_autogroup), which starves those of many threads
    where cores are short.
    """

    def __init__(
        self,
        *flags: str,
        log: Path,
        env: Mapping[str, str | None] | None = None,
        enter: Sequence[str] = (),
        module: str = "jdisagg.serve",
    ) -> None:
        """`env`: beside this process's own, of which it gets what is None here not. `enter`: a command that becomes the one
        behind it, elsewhere."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **(env or {})}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-m", module, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env={name: value for name, value in environment.items() if value is not None},
                bufsize=0,  # a line that is read ahead would not be seen by `select`
                process_group=0,
            )

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None] = lambda _: None) -> Ready:
        """Its READY; raises RuntimeError with the end of the log when it does not come. `on_wait` gets the seconds so far."""
        assert self.process.stdout is not None
        began_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (seconds := time.monotonic() - began_s) < timeout_s and self.process.poll() is None:
                on_wait(seconds)
                if selector.select(timeout=1.0) and (ready := parse(self.process.stdout.readline().decode())) is not None:
                    return ready
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"not ready (exit status {self.process.poll()}); the end of {self._log}:\n{tail}")

    @property
    def has_ended(self) -> bool:
        """Asked without reaping it: whoever reaps a process that was just killed has been seen to wait for a second, in the
        kernel, which then clears what it knows of /proc. So loops ask this, and threads reap."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # a thread has just reaped it
            return True

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End it, by SIGKILL after `timeout_s`; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Kill it if it lives, and give back its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def free_port() -> int:
    """A port for a server that this process will start, and for nobody else until `release_port` or the end of this process.

    It stays bound here, without listening. So neither is a second server sent there before the first one listens, nor is it
    given to a connection: one that tries to reach it while nobody listens could even get the port itself, at both of its ends.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with suppress(OSError):
            with socket.socket() as probe:  # it shares with nobody
                probe.bind((HOST, port))
            _held[port] = _shared(port)
            return port
    raise RuntimeError(f"every port of {PORTS.start} to {PORTS.stop - 1} is taken")


def _shared(port: int) -> socket.socket:
    """Bound so that a server can bind and listen, too."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        raise
    return holder


def release_port(port: int) -> None:
    """What `free_port` gave is no longer needed."""
    _held.pop(port).close()


@atexit.register
def _release_ports() -> None:
    for port in list(_held):
        release_port(port)


def stream(
    address: str, request: generation_pb2.GenerateRequest, timeout_s: float, on_text: Callable[[str], None] = lambda _: None
) -> generation_pb2.Complete:
    """Run one Generate; `on_text` gets the text as it comes. Raises grpc.RpcError."""
    with open_blocking_channel(address) as channel:
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout_s):
            if response.HasField("complete"):
                return response.complete
            on_text(response.delta.text)
    raise RuntimeError(f"{address}: the stream ended without its closing message")
