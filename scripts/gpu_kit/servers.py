"""The workers of one section: flags, READY, counters, and an end for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bench_kit.client import Client, by_label, counters
from fleet_process import FleetProcess, free_port

from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.shapes import served_shape
from jdisagg.serve.ready import Ready

SHARE = 0.4  # of the device's memory, for each of two processes on it
COLOCATED_BYTES = "16GiB"  # two pools in one process cannot both take a share of what is free
DEAD_AFTER_S = 2.0
STEP_TIMEOUT_S = 60.0


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

    def counters(self) -> dict[str, float]:
        """Samples by name, labels added up."""
        assert self.ready.http is not None
        return counters(self.ready.http)

    def bytes_by_backend(self) -> dict[str, float]:
        """KV bytes received, by the backend that carried them."""
        assert self.ready.http is not None
        return by_label(self.ready.http, "jdisagg_transfer_bytes_total", "backend")


class Servers:
    """Starts workers; `close` ends all of them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._processes: list[FleetProcess] = []
        self._servers: list[Server] = []

    def launch(self, name: str, *flags: str, env: Mapping[str, str] | None = None) -> tuple[FleetProcess, str]:
        """Start a worker; its gRPC address is known before it is READY, so that others may start beside it."""
        port = free_port()
        common = ("--grpc-port", str(port), "--step-timeout-s", str(STEP_TIMEOUT_S), "--drain-s", "2")
        process = FleetProcess(*common, *flags, log=self._setting.log(name), env=env)
        self._processes.append(process)
        return process, f"127.0.0.1:{port}"

    def wait(self, process: FleetProcess) -> Server:
        """Until it is READY. Raises RuntimeError with the end of its log."""
        ready = process.wait_ready(self._setting.clock.left_s())
        assert ready.grpc is not None
        client = Client(ready.grpc, timeout_s=max(5.0, self._setting.clock.left_s()))
        self._servers.append(Server(process=process, ready=ready, client=client))
        return self._servers[-1]

    def end(self, server: Server, findings: Findings, name: str) -> None:
        """SIGTERM; it has to leave with status 0."""
        server.client.close()
        status = server.process.stop()
        findings.check(f"{name} ends well", status == 0, f"exit status {status}")

    def close(self) -> None:
        """Kill what still runs."""
        for server in self._servers:
            server.client.close()
        for process in self._processes:
            process.close()


@contextmanager
def servers(setting: Setting) -> Iterator[Servers]:
    """Workers that end with the block."""
    started = Servers(setting)
    try:
        yield started
    finally:
        started.close()


def engine_flags(setting: Setting, *, share: bool = True) -> tuple[str, ...]:
    """Equal for every engine whose streams are compared: the same model, the same executables."""
    scale, small = setting.scale, setting.small
    longest = max(*scale.ttft_prompts, 3 * scale.prompt_tokens[1]) + 64
    pool = () if small else ("--kv-cache-bytes", COLOCATED_BYTES)
    model = served_shape(small=small).write(setting.scratch / "served", longest)
    return (
        *("--model", str(model), "--load-format", "dummy", "--served-model-name", "check", "--numerics", "exact"),
        *("--dtype", "float32" if small else "bfloat16", "--max-model-len", str(longest), "--page-size", "16"),
        *("--max-num-seqs", str(scale.at_once), "--max-num-batched-tokens", "64" if small else "512"),
        *("--transfer-chunk-tokens", "32" if small else "256", "--dead-after-s", str(DEAD_AFTER_S)),
        *(("--device-memory-utilization", str(SHARE)) if share else pool),
    )


def check_compiles(server: Server, findings: Findings, name: str) -> None:
    """Nothing compiles after READY."""
    after = server.counters()["jdisagg_compiles_after_ready_total"]
    findings.check(f"{name}: nothing compiled after READY", after == 0, f"{after:g} compilations")
