"""Block sizes of the TPU attention kernel: by a rule, overridden by what was measured on a chip.

Measured sizes lie in `tuned/*.json` files, one per chip, which `scripts/tune_kernels.py` writes:

    {"device": "TPU v6e", "jax": "0.10.2", "blocks": [{"decode": true, "dim": 128, "kv_heads": 8, "query_heads": 32,
      "dtype": "bfloat16", "page_size": 16, "queries": 1, "pages": 16, "microseconds": 41.2}]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

KEY_FIELDS = ("decode", "dim", "kv_heads", "query_heads", "dtype", "page_size")  # of a measured entry
TUNED = Path(__file__).parent / "tuned"
_BUFFER_BYTES = 2**20  # of keys and values in flight: less does not hide a copy's latency behind the one before
_MOST_KEYS = 1024  # tokens of a block: more only wastes the last one
_LEAST_KEYS = 128  # a register's lanes
_PRODUCT_ROWS = 512  # (query, head) rows that meet a block of keys: enough arithmetic per byte for every chip
_MOST_QUERIES = 128
_LEAST_QUERIES = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of one compiled kernel."""

    queries: int  # 1 decodes
    pages: int


def blocks_by_rule(*, kv: jax.Array, q: jax.Array, decode: bool, max_pages: int) -> Blocks:
    """Blocks for q [T, H, D], heads-major kv [L, P, K, S, F] (abstract ones too) and page tables of `max_pages` entries."""
    num_kv_heads, page_size = kv.shape[2:4]
    pages = max(1, min(keys_by_rule(kv) // page_size, max_pages))
    if decode:
        return Blocks(1, pages)
    wanted = max(_LEAST_QUERIES, _PRODUCT_ROWS * num_kv_heads // q.shape[1])
    return Blocks(min(power_of_two(wanted), _MOST_QUERIES, whole(q.shape[0])), pages)


def keys_by_rule(kv: jax.Array) -> int:
    """Tokens of a block of keys, where whole pages make it up and sequences may be that long."""
    num_kv_heads, _, features = kv.shape[2:]
    token_bytes = num_kv_heads * features * kv.dtype.itemsize
    return power_of_two(max(_LEAST_KEYS, min(_MOST_KEYS, _BUFFER_BYTES // token_bytes)))


def tuned(device_kind: str) -> BlockTable | None:
    """What was measured on such chips, if there is a data file for them."""
    path = TUNED / f"{file_stem(device_kind)}.json"
    return BlockTable.read(path) if path.is_file() else None


def file_stem(device_kind: str) -> str:
    """Name of a chip's data file: "TPU v6 lite" -> "tpu_v6_lite"."""
    return "_".join(device_kind.lower().split())


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Measured sizes by what they depend on; what was not measured follows the rule."""

    measured: dict[tuple[Any, ...], Blocks]

    @classmethod
    def read(cls, path: Path) -> BlockTable:
        """Load a data file. Raises ValueError naming the file and the entry that is wrong."""
        content = json.loads(path.read_text())
        measured = {}
        for number, entry in enumerate(content.get("blocks", ())):
            try:
                key = tuple(entry[name] for name in KEY_FIELDS)
                measured[key] = Blocks(int(entry["queries"]), int(entry["pages"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: blocks[{number}]: {error!r}; run scripts/tune_kernels.py again") from error
        return cls(measured)

    def blocks(self, *, kv: jax.Array, q: jax.Array, decode: bool, max_pages: int) -> Blocks:
        """See `blocks_by_rule`."""
        rule = blocks_by_rule(kv=kv, q=q, decode=decode, max_pages=max_pages)
        key = (decode, q.shape[2], kv.shape[2], q.shape[1], str(kv.dtype), kv.shape[3])
        found = self.measured.get(key)
        if found is None:
            return rule
        return Blocks(1 if decode else min(found.queries, whole(q.shape[0])), min(found.pages, max_pages))


def power_of_two(value: int) -> int:
    """The largest one that is not greater."""
    return 1 << (value.bit_length() - 1)


def whole(value: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (value - 1).bit_length()
