"""Compile every executable of a worker, several at a time, and run each before it says READY."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jdisagg.engine.device import Device
from jdisagg.engine.executables import Executable, executables
from jdisagg.engine.runner import ModelRunner
from jdisagg.engine.signatures import STATE_UPDATES
from jdisagg.kv.memory import wants_memory

log = logging.getLogger(__name__)

_NO_ROOM = (
    "--max-num-batched-tokens: no memory is left to run {executable.name} ({executable.shape}) beside weights and KV; lower "
    "it, --max-num-seqs or --transfer-chunk-tokens, or what KV gets (--kv-cache-bytes, --num-pages, "
    "--device-memory-utilization)"
)
MOST_AT_ONCE = 4  # are compiled: each takes some of the host's memory, and of a device's where kernels are tried out


@dataclass(frozen=True, slots=True)
class Warmed:
    """One executable: `seconds` is what its compilation (or a cache read) was waited for, and one run."""

    name: str
    shape: str
    seconds: float


def warm_up(runner: ModelRunner, *, num_cores: int = 1) -> list[Warmed]:
    """Run everything once that the worker can need, on padding alone: slots, counts and pages (but the null page) stay. Raises
    NoMemory where there is none for that beside weights and pool. `num_cores`: as many are compiled at a time."""
    warmed: list[Warmed] = []
    todo = list(executables(runner.shape, runner.device.shape))
    waited_s = _compile(runner.device, todo, min(num_cores, MOST_AT_ONCE))
    for executable, compiled_s in zip(todo, waited_s, strict=True):
        started_s = time.monotonic()
        with wants_memory(_NO_ROOM.format(executable=executable)):
            jax.block_until_ready(_run(runner.device, executable))
        _trim()
        warmed.append(Warmed(executable.name, executable.shape, compiled_s + time.monotonic() - started_s))
    return warmed


def _compile(device: Device, todo: Sequence[Executable], num_threads: int) -> list[float]:
    """Compile all; returns for how long each was waited for. A call then finds what the text of its function was compiled to.
    Nothing runs meanwhile, as a compiler that tries kernels out takes memory. Only to trace and lower takes the interpreter."""
    waited_s: list[float] = []
    threads = ThreadPoolExecutor(num_threads, "compile")
    try:
        compiled = [threads.submit(device.lower(each.name, each.arguments).compile) for each in todo]
        for executable, future in zip(todo, compiled, strict=True):
            started_s = time.monotonic()
            with wants_memory(_NO_ROOM.format(executable=executable)):
                future.result()
            waited_s.append(time.monotonic() - started_s)
            log.info("compiled %s (%s) in %.2f s", executable.name, executable.shape, waited_s[-1])
    finally:
        threads.shutdown(cancel_futures=True)  # what is being compiled cannot be stopped
    return waited_s


def _trim() -> None:
    """Give what loading and compiling freed back to the system: glibc would keep 150-190 MB of it resident for ever."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _run(device: Device, executable: Executable) -> Any:
    if executable.name in STATE_UPDATES:
        return device.update(executable.name, *executable.arguments)
    calls: dict[str, Callable[..., Any]] = {
        "exact": device.exact,
        "prefill": device.prefill,
        "decode": device.decode,
        "export": device.export,
        "score": lambda wanted: device.score(device.empty_hidden(), wanted),
        "import": lambda where: device.import_piece(device.empty_piece(), where),
    }
    return calls[executable.name](*executable.arguments)
