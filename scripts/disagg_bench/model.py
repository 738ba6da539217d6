"""The model under test: random weights, real sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench_kit.model import write_model

HEAD_DIM = 64
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A Llama with two query heads per KV head, served in float32."""

    num_layers: int
    embed: int  # a multiple of 128

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.embed // HEAD_DIM

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.num_heads // 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.num_layers * 2 * self.num_kv_heads * HEAD_DIM * FLOAT32_BYTES

    def write(self, directory: Path, max_model_len: int) -> None:
        """config.json, and the demo model's tokenizer, into `directory` (created)."""
        sizes = {
            "hidden_size": self.embed,
            "intermediate_size": self.embed * 11 // 4,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": max_model_len,
        }
        write_model(directory, sizes)
