"""What one KV cache group looks like, independent of pages and devices. No jax here."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # by dtype
QUANTISED = "int8"
SCALES = 2  # float32 per (layer, token, head) of a quantised group: one for keys, one for values
SCALE_BYTES = 4 * SCALES


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSpec:
    """One group of layers that share page tables."""

    num_layers: int  # L
    num_kv_heads: int  # K, before replication for tensor parallelism
    features: int  # F per head and token: keys then values, 2 * head_dim
    dtype: str  # a key of ITEM_BYTES
    kind: str = "full"  # "full" | "window"
    window: int | None = None

    @property
    def quantised(self) -> bool:
        """True when data are integers that mean something with their scales only."""
        return self.dtype == QUANTISED

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers and heads, scales included (replicas not counted)."""
        per_head = self.features * ITEM_BYTES[self.dtype] + (SCALE_BYTES if self.quantised else 0)
        return self.num_layers * self.num_kv_heads * per_head

    @property
    def most_bytes_per_token(self) -> int:
        """The same for the widest dtype a peer may keep it in."""
        return self.num_layers * self.num_kv_heads * max(self.features * 4, self.features + SCALE_BYTES)
