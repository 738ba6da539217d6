"""Block sizes of the GPU attention kernel, by a rule made for Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.blocks import power_of_two, whole

LEAST = 16  # rows, keys and features of a product of the tensor cores
_PROCESSORS = 132  # of an H100 or H200
_RESIDENT = 4  # programs that share a processor while they decode: enough copies in flight to hide the memory's latency
_STAGE_BYTES = 32 * 2**10  # of keys and values; three stages of two programs fit a processor's shared memory
_MOST_KEYS = 128
_MOST_SPLITS = 128
_PREFILL_ROWS = 128  # two warp groups of 64: the Hopper matrix unit's least number
_EXACT_ROWS = 32  # float32 products do not use the matrix unit and keep everything in registers
_PREFILL_SPLITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBlocks:
    """Sizes of one compiled kernel; rows and keys are powers of two."""

    rows: int  # (query, head of the group) rows of a program, at least LEAST
    keys: int  # tokens of a step of its loop, at least LEAST
    splits: int  # programs that share a row's keys
    warps: int
    stages: int


def gpu_blocks_by_rule(*, kv: Any, q: Any, decode: bool, num_rows: int, max_keys: int) -> GpuBlocks:
    """Blocks for q [T, H, D] and tokens-major kv [L, P, S, K, F] (abstract ones too), `num_rows` rows of `max_keys` tokens.

    Products are made in the dtype of `q`.
    """
    num_queries, num_heads, _ = q.shape
    num_kv_heads, features = kv.shape[3:]
    group = num_heads // num_kv_heads
    exact = q.dtype.itemsize == 4
    # In prefill the matrix unit reads keys and values from shared memory, integers widened.
    width = kv.dtype.itemsize if decode and not exact else q.dtype.itemsize
    keys = max(LEAST, min(_MOST_KEYS, power_of_two(_STAGE_BYTES // (features * width)), whole(max_keys)))
    if decode:
        programs, wanted, most = num_rows * num_kv_heads, _RESIDENT * _PROCESSORS, _MOST_SPLITS
        rows = max(LEAST, whole(group))
    else:
        rows = max(LEAST, whole(group), min(_EXACT_ROWS if exact else _PREFILL_ROWS, whole(num_queries * group)))
        programs, wanted, most = -(-num_queries // (rows // group)) * num_kv_heads, _PROCESSORS, _PREFILL_SPLITS
    # The nearest number: a third split, of which few would be wanted, costs more (H200, 32 rows at 1k: 51 us a layer for 45).
    splits = max(1, min(round(wanted / programs), most, -(-max_keys // keys)))
    return GpuBlocks(rows=rows, keys=keys, splits=splits, warps=8 if rows >= _PREFILL_ROWS else 4, stages=1 if exact else 3)
