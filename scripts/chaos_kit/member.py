"""One place in the fleet and the processes that fill it one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from bench_kit.samples import samples
from fleet_process import FleetProcess, free_port, release_port

from chaos_kit.proxy import Proxy
from jdisagg.serve.ready import Ready

READY_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 5.0


class Member:
    """A router or worker: started, struck, and started again under the same name."""

    def __init__(
        self,
        name: str,
        *flags: str,
        directory: Path,
        http: httpx.AsyncClient,
        proxy: Proxy | None = None,
        env: Mapping[str, str] | None = None,
        enter: Sequence[str] = (),
    ) -> None:
        """A worker gets a new port each time and registers under `proxy`'s; who has none keeps the ports in its flags. `enter`
        begins the command where it is to run on another host."""
        self.name = name
        self.proxy = proxy
        self.incarnation = 0
        self.up = False  # READY and not struck down since
        self.frozen = False
        self.ready: Ready | None = None
        self.process: FleetProcess | None = None
        self._port = 0  # a worker's own, behind the proxy
        self._flags = flags
        self._directory = directory
        self._http = http
        self._env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **(env or {})}
        self._enter = enter

    @property
    def pid(self) -> int:
        """Of the process there is now."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.process.pid

    @property
    def address(self) -> str:
        """Under which a worker behind a proxy registers."""
        assert self.proxy is not None, f"{self.name} has no proxy"
        return f"127.0.0.1:{self.proxy.port}"

    @property
    def grpc(self) -> str:
        """HOST:PORT of its latest READY."""
        assert self.ready is not None, f"{self.name} was never READY"
        return str(self.ready.grpc)

    @property
    def http(self) -> str:
        """Likewise."""
        assert self.ready is not None, f"{self.name} was never READY"
        return str(self.ready.http)

    @property
    def log(self) -> Path:
        """Of the process there is now."""
        return self._directory / f"{self.name}-{self.incarnation}.log"

    def logs(self) -> str:
        """What all its processes have written."""
        paths = [self._directory / f"{self.name}-{number}.log" for number in range(1, self.incarnation + 1)]
        return "".join(path.read_text(errors="replace") for path in paths)

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self.process is None or self.process.has_ended

    def start(self, env: Mapping[str, str], checkout: Path | None = None) -> None:
        """Start a process, of another `checkout` than this; call it on the thread that outlives it: it dies with its parent
        thread."""
        self.incarnation += 1
        flags = list(self._flags)
        if self.proxy is not None:
            if self._port:
                release_port(self._port)
            self._port = free_port()
            flags += ["--grpc-port", str(self._port), "--advertise-port", str(self.proxy.port)]
            self.proxy.target_port = self._port
        enter = self._enter if checkout is None else (*self._enter, "env", f"--chdir={checkout}")
        self.process = FleetProcess(*flags, log=self.log, env={**self._env, **env}, enter=enter)

    async def wait_ready(self) -> None:
        """Until its READY line; raises RuntimeError with the end of its log."""
        process = self.process
        assert process is not None
        self.ready = await asyncio.to_thread(process.wait_ready, READY_TIMEOUT_S)
        self.up = True

    def kill(self) -> None:
        """SIGKILL, now."""
        self.up = False
        self.frozen = False
        if self.process is not None and not self.gone:
            os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT, if it still lives."""
        self.frozen = False
        if not self.gone:
            os.kill(self.pid, signal.SIGCONT)

    def hang(self) -> None:
        """Its engine stops, as with a hung device; the process goes on."""
        self.frozen = True
        os.kill(self.pid, signal.SIGUSR2)

    def recover(self) -> None:
        """The engine goes on, if the process still lives."""
        self.frozen = False
        if not self.gone:
            os.kill(self.pid, signal.SIGUSR2)

    def break_engine(self) -> None:
        """Its engine raises, as when a step fails."""
        self.up = False
        os.kill(self.pid, signal.SIGRTMIN)

    async def end(self) -> int:
        """SIGTERM and wait: it drains. Its exit status."""
        self.up = False
        self.thaw()
        assert self.process is not None
        return await asyncio.to_thread(self.process.stop)

    async def reap(self) -> None:
        """Wait for the process, killed if it lives, and give back its pipes."""
        assert self.process is not None
        await asyncio.to_thread(self.process.close)

    # --- looking from outside

    async def get(self, path: str) -> str:
        """HTTP GET; raises httpx.HTTPError."""
        answer = await self._http.get(f"http://{self.http}{path}", timeout=ASK_TIMEOUT_S)
        return answer.text

    async def state(self) -> dict[str, Any]:
        """GET /debug/state."""
        return json.loads(await self.get("/debug/state"))

    async def metrics(self) -> dict[str, float]:
        """All samples by name and labels, `name{label="value"}`."""
        return samples(await self.get("/metrics"))


async def kill_all(members: Iterable[Member]) -> None:
    """End the processes of those that were ever started, all at once."""
    started = [member for member in members if member.process is not None]
    for member in started:
        member.kill()
    for member in started:
        await member.reap()
