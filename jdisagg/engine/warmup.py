"""Compile and run every executable of a worker before it says READY."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdisagg.engine import admission
from jdisagg.engine.packing import empty_exact, empty_prefill
from jdisagg.engine.runner import ModelRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Warmed:
    """One executable: `seconds` is compilation (or a cache read) and one run."""

    name: str
    shape: str
    seconds: float


def warm_up(runner: ModelRunner) -> list[Warmed]:
    """Run everything once that the worker can need, on padding alone: slots, counts and pages (but the null page) stay."""
    warmed: list[Warmed] = []
    for name, shape, run in _executables(runner):
        started_s = time.monotonic()
        jax.block_until_ready(run())
        _trim()
        warmed.append(Warmed(name, shape, time.monotonic() - started_s))
        log.info("compiled %s (%s) in %.2f s", name, shape, warmed[-1].seconds)
    return warmed


def _trim() -> None:
    """Give what loading and compiling freed back to the system: glibc would keep 150-190 MB of it resident for ever."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _executables(runner: ModelRunner) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    device, dummy = runner.device, runner.device.shape.max_num_seqs
    sizes = device.shape
    empty = admission.empty_admissions(num_slots=dummy, width=sizes.pages_per_seq, vocab_size=sizes.vocab_size)
    yield "admit", f"{admission.ADMIT_ROWS} slots", lambda: device.admit(empty)
    yield "append", f"{dummy} pages", lambda: device.append_pages(admission.empty_appends(dummy))
    yield "history", f"{admission.HISTORY_CELLS} cells", lambda: device.add_history(*admission.empty_history(dummy))
    if runner.shape.exact:
        batch = empty_exact(dummy)
        yield "exact", f"{len(np.asarray(batch.slots))} rows", lambda: device.exact(batch)
    for bucket in runner.shape.prefill:
        yield "prefill", f"{bucket.num_tokens} tokens", lambda bucket=bucket: device.prefill(empty_prefill(bucket, dummy))
    for rows in runner.shape.decode:
        yield "decode", f"{rows} rows", lambda rows=rows: device.decode(np.full(rows, dummy, np.int32))
    nowhere = np.zeros((2, sizes.chunk_tokens), np.int32)
    yield "export", f"{sizes.chunk_tokens} tokens", lambda: device.export(nowhere)  # everywhere: forks, host copies, NanSearch
    yield "import", f"{sizes.chunk_tokens} tokens", lambda: device.import_piece(device.empty_piece(), nowhere)
