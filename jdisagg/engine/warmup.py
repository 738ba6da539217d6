"""Compile and run every executable of a worker before it says READY."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jdisagg.engine.device import Device
from jdisagg.engine.executables import STATE_UPDATES, Executable, executables
from jdisagg.engine.runner import ModelRunner
from jdisagg.kv.memory import wants_memory

log = logging.getLogger(__name__)

_NO_ROOM = (
    "--max-num-batched-tokens: no memory is left to run {executable.name} ({executable.shape}) beside weights and KV; lower "
    "it, --max-num-seqs or --transfer-chunk-tokens, or what KV gets (--kv-cache-bytes, --num-pages, "
    "--device-memory-utilization)"
)


@dataclass(frozen=True, slots=True)
class Warmed:
    """One executable: `seconds` is compilation (or a cache read) and one run."""

    name: str
    shape: str
    seconds: float


def warm_up(runner: ModelRunner) -> list[Warmed]:
    """Run everything once that the worker can need, on padding alone: slots, counts and pages (but the null page) stay. Raises
    NoMemory where there is none for that beside weights and pool."""
    warmed: list[Warmed] = []
    for executable in executables(runner.shape, runner.device.shape):
        started_s = time.monotonic()
        with wants_memory(_NO_ROOM.format(executable=executable)):
            jax.block_until_ready(_run(runner.device, executable))
        _trim()
        warmed.append(Warmed(executable.name, executable.shape, time.monotonic() - started_s))
        log.info("compiled %s (%s) in %.2f s", executable.name, executable.shape, warmed[-1].seconds)
    return warmed


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
