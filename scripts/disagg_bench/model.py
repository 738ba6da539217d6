"""A model with random weights and real sizes, as a directory that `--load-format dummy` serves."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jdisagg.models.resolve import read_config, resolve_model

HEAD_DIM = 64
FLOAT32_BYTES = 4
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_FIRST_PLAIN_TOKEN = 16  # smaller ids may be special


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


def write_model(directory: Path, sizes: Mapping[str, object]) -> Path:
    """The demo model's config.json with other `sizes`, and its tokenizer, in `directory` (created and returned)."""
    directory.mkdir(parents=True, exist_ok=True)
    demo = resolve_model("demo")
    for name in _TOKENIZER_FILES:
        shutil.copy(demo / name, directory / name)
    (directory / "config.json").write_text(json.dumps({**read_config(demo), **sizes}, indent=1))
    return directory


class Prompts:
    """Random token ids: no two prompts share a prefix, so no cache helps, and equal seeds give equal prompts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = int(read_config(resolve_model("demo"))["vocab_size"])

    def next(self, num_tokens: int) -> list[int]:
        """The next prompt."""
        return self._random.choices(range(_FIRST_PLAIN_TOKEN, self._vocab_size), k=num_tokens)
