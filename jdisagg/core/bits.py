"""Bits of two `exact` workers, as each tried them out (`jdisagg.engine.bits`): "TOKENS-HASH", "" where it has not."""

from __future__ import annotations

UNLIKE_TOKENS = 4096  # of prompts that may wait more at a prefill worker of the bits wanted, before another one is asked
SAME_BY = "the same kind of device, jax, --tensor-parallel-size and --kv-cache-dtype"  # what gives the same bits


def are_unlike(ours: str, theirs: str) -> bool:
    """Whether they are known to compute other bits: both have tried, with as many tokens."""
    return bool(ours and theirs) and ours != theirs and ours.partition("-")[0] == theirs.partition("-")[0]
