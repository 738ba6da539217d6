"""The workers under test: unified, P and D, each on cores of its own, all with equal settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_kit.client import Client
from fleet_process import FleetProcess

READY_TIMEOUT_S = 240.0
PAGE_SIZE = 16
CHUNK_TOKENS = 512  # prompt tokens of one prefill step
PIECE_TOKENS = 256
MAX_NUM_SEQS = 8


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process that serves."""

    client: Client
    pid: int
    http: str
    grpc: str
    log: Path  # its stderr, debug lines included
    schedule_log: Path

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, all threads; what others do on its core shows least in these."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


class Fleet:
    """Starts workers one after the other; `stop` ends all of them."""

    def __init__(self, model: Path, work: Path, *, max_model_len: int, num_pages: int) -> None:
        """`work` takes logs."""
        self._work = work
        self._processes: list[FleetProcess] = []
        self._clients: list[Client] = []
        self._flags = (
            *("--model", str(model), "--load-format", "dummy", "--served-model-name", "bench"),
            *("--dtype", "float32", "--max-model-len", str(max_model_len), "--num-pages", str(num_pages)),
            *("--page-size", str(PAGE_SIZE), "--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--max-num-batched-tokens", str(CHUNK_TOKENS), "--transfer-chunk-tokens", str(PIECE_TOKENS)),
            *("--port", "0", "--grpc-port", "0", "--step-timeout-s", "120", "--drain-s", "2"),
            *("--dead-after-s", "10", "--lease-s", "60"),  # a busy machine makes figures worse, it does not end the run
        )

    def start(self, name: str, cores: str, *flags: str) -> Worker:
        """A worker called `name`, ready. Raises RuntimeError with the end of its log when it does not come up."""
        log, schedule_log = self._work / f"{name}.log", self._work / f"{name}.schedule"
        # P's is read; the unified worker's costs it as much; D's would cost a tenth of its steps, which are short
        logged = () if name == "decode" else ("--schedule-log", str(schedule_log))
        process = FleetProcess(*self._flags, "--cpu-affinity", cores, *logged, *flags, log=log)
        self._processes.append(process)
        ready = process.wait_ready(READY_TIMEOUT_S)
        assert ready.grpc is not None
        assert ready.http is not None
        self._clients.append(Client(ready.grpc))
        at = {"client": self._clients[-1], "pid": ready.pid, "http": ready.http, "grpc": ready.grpc}
        return Worker(**at, log=log, schedule_log=schedule_log)

    def stop(self) -> None:
        """End every process."""
        for client in self._clients:
            client.close()
        for process in reversed(self._processes):
            process.stop()


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who is compared."""

    unified: Worker  # on P's core
    prefill: Worker
    decode: Worker  # on a core of its own
    unified_wide: Worker | None  # on both cores: the same hardware as P and D together


@contextmanager
def started(fleet: Fleet, cores: tuple[str, str], *, wide: bool) -> Iterator[Workers]:
    """Everything that a run needs, ended with it."""
    p_core, d_core = cores
    try:
        prefill = fleet.start("prefill", p_core, "--role", "prefill")
        decode_flags = ("--role", "decode", "--prefill", prefill.grpc, "--local-prefill", "never")
        decode = fleet.start("decode", d_core, *decode_flags)
        unified = fleet.start("unified", p_core, "--role", "unified")
        both = fleet.start("unified-wide", f"{p_core},{d_core}", "--role", "unified") if wide else None
        yield Workers(unified=unified, prefill=prefill, decode=decode, unified_wide=both)
    finally:
        fleet.stop()
