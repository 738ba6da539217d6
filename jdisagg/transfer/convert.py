"""KV rows from one dtype to another, in host memory: D converts what P sends in a dtype that is not its own.

Through float32, which holds every value of the others exactly. Rounding is to nearest, ties to even. What float16 cannot
hold (finite, beyond 65504) becomes the nearest it can: one such key among thousands would make the attention over all of
them NaN, a clipped one bends one score. NaN and infinity stay what they are.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jdisagg.kv.group import KVGroup
from jdisagg.kv.quantise import dequantise, quantise
from jdisagg.kv.spec import QUANTISED

NP_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    QUANTISED: np.dtype(np.int8),
}
_FLOAT16_MAX = np.float32(np.finfo(np.float16).max)


def convert(rows: KVGroup, dtype: str) -> KVGroup:
    """`rows` [..., F] as `dtype`; the same object when they are it already."""
    if rows.data.dtype == NP_DTYPES[dtype]:
        return rows
    with np.errstate(invalid="ignore"):  # NaN: what a broken prompt holds is for D's logits to find
        floats = rows.data.astype(np.float32) if rows.scales is None else dequantise(rows.data, rows.scales)
        if dtype == QUANTISED:
            return KVGroup(*quantise(floats))
        if dtype == "float16":
            floats = np.where(np.isfinite(floats), floats.clip(-_FLOAT16_MAX, _FLOAT16_MAX), floats)
        return KVGroup(floats.astype(NP_DTYPES[dtype]))
