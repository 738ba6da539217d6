"""Bits of two `exact` workers, as each tried them out (`jdisagg.engine.bits`): "PROBE-HASH", "" where it has not."""

from __future__ import annotations

# How much busier a worker of the bits wanted may be than another one, before that is asked: else all would wait for the last
# worker of the old bits in a roll-out.
UNLIKE_TOKENS = 4096  # of prompts that wait at a prefill worker
UNLIKE_REQUESTS = 16  # that a decode worker has
SAME_BY = "the same kind of device, jax, --tensor-parallel-size and --kv-cache-dtype"  # what gives the same bits


def are_unlike(ours: str, theirs: str) -> bool:
    """Whether they are known to compute other bits: both have tried, and tried the same."""
    return bool(ours and theirs) and ours != theirs and ours.partition("-")[0] == theirs.partition("-")[0]
