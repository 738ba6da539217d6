"""What it costs to move KV to the host and back, and to compute it again: measured once, before READY."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdisagg.engine.buckets import EXACT_ROWS
from jdisagg.engine.packing import empty_exact, empty_prefill
from jdisagg.engine.runner import ModelRunner

REPEATS = 3
NOT_HERE_S = 1.0  # per token, where this worker must not prefill: anything is better than asking the other side again


@dataclass(frozen=True, kw_only=True, slots=True)
class RetractionCost:
    """Seconds. The way out and back is compared with computing (or fetching) the tokens again."""

    copy_s_per_token: float  # one way
    recompute_s_per_token: float

    @property
    def prefers_copy(self) -> bool:
        """The round trip is not slower than recomputation."""
        return 2 * self.copy_s_per_token <= self.recompute_s_per_token


def measure_retraction_cost(runner: ModelRunner) -> RetractionCost:
    """Run warmed executables on padding alone: no slot, count or page but the null page is touched."""
    device, dummy = runner.device, runner.device.shape.max_num_seqs
    nowhere = np.zeros((2, runner.chunk_tokens), np.int32)

    def there_and_back() -> Any:
        on_host = jax.device_get(device.export(nowhere))
        device.import_piece(jax.device_put(on_host, device.piece_sharding), nowhere)
        return device.export(nowhere)  # after the import, which returns nothing to wait for

    copy_s = _fastest(there_and_back) / (2 * runner.chunk_tokens)
    if runner.shape.exact:
        batch = empty_exact(dummy)
        recompute_s = _fastest(lambda: device.exact(batch)) / EXACT_ROWS
    elif runner.shape.prefill:
        bucket = runner.shape.prefill[-1]
        recompute_s = _fastest(lambda: device.prefill(empty_prefill(bucket, dummy))) / bucket.num_tokens
    else:
        recompute_s = NOT_HERE_S
    return RetractionCost(copy_s_per_token=copy_s, recompute_s_per_token=recompute_s)


def _fastest(run: Callable[[], Any]) -> float:
    times_s = []
    for _ in range(REPEATS):
        started_s = time.monotonic()
        jax.block_until_ready(run())
        times_s.append(time.monotonic() - started_s)
    return min(times_s)
