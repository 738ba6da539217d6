"""What one KV cache group looks like, independent of pages and devices. No jax here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSpec:
    """One group of layers that share page tables."""

    num_layers: int  # L
    num_kv_heads: int  # K, before replication for tensor parallelism
    features: int  # F per head and token: keys then values, 2 * head_dim
    dtype: str  # "float32" | "bfloat16" | "float16"
    kind: str = "full"  # "full" | "window"
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers and heads (replicas not counted)."""
        return self.num_layers * self.num_kv_heads * self.features * (4 if self.dtype == "float32" else 2)
