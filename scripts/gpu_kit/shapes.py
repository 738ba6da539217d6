"""Models with random weights in real shapes: layers of Llama 3 8B, as many as a check can afford; tiny ones for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench_kit.model import write_model

EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,  # tied random weights just repeat the last token
}
EIGHT_B_LAYERS, EIGHT_B_VOCAB = 32, 128256
# what jdisagg.aot calls them, by device kind
TOPOLOGIES = {"NVIDIA H100 80GB HBM3": "h100:1", "NVIDIA H200": "h200:1", "cpu": "cpu:1"}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
ONE_B = {  # layers of Llama 3.2 1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
SERVED_LAYERS, ONE_B_LAYERS, TINY_LAYERS = 4, 16, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A config.json. `vocab_size` None = the demo tokenizer's, which a model needs that speaks text."""

    sizes: Mapping[str, object]
    num_layers: int
    vocab_size: int | None = None

    def write(self, directory: Path, max_model_len: int) -> Path:
        """Into `directory`, with a tokenizer; returns it."""
        sizes = {**self.sizes, "num_hidden_layers": self.num_layers, "max_position_embeddings": max_model_len}
        return write_model(directory, sizes | ({"vocab_size": self.vocab_size} if self.vocab_size else {}))


TINY_SHAPE = Shape(sizes=TINY, num_layers=TINY_LAYERS)


def served_shape(*, small: bool) -> Shape:
    """What the engines serve: few layers, of real width."""
    return TINY_SHAPE if small else Shape(sizes=EIGHT_B, num_layers=SERVED_LAYERS)


def whole_shape(*, small: bool) -> Shape:
    """What steps are measured on: Llama 3 8B."""
    return TINY_SHAPE if small else Shape(sizes=EIGHT_B, num_layers=EIGHT_B_LAYERS, vocab_size=EIGHT_B_VOCAB)


def batch_shape(*, small: bool) -> Shape:
    """What an offline batch runs on."""
    return TINY_SHAPE if small else Shape(sizes=ONE_B, num_layers=ONE_B_LAYERS)
