"""A tiny random Llama as a Hugging Face directory, with the demo model's tokenizer: real files, seconds to compile.

Weights are larger than usual so that greedy streams vary instead of repeating one token.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from bench_kit.model import write_model
from safetensors.numpy import save_file

from jdisagg.models.resolve import read_config, resolve_model

SCALE = 0.35
LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 64, 4, 4, 16, 96


def make_tiny_model(directory: Path, *, seed: int = 0, max_model_len: int = 512) -> Path:
    """Write the model into `directory` (created) and return it."""
    sizes = {
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    write_model(directory, sizes)
    shutil.copy(resolve_model("demo") / "generation_config.json", directory)
    vocab, rng = read_config(directory)["vocab_size"], np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * SCALE).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(vocab, EMBED),
        "model.norm.weight": np.ones(EMBED, np.float32),
        "lm_head.weight": weight(vocab, EMBED),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(EMBED, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(EMBED, np.float32),
            prefix + "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, EMBED),
            prefix + "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, EMBED),
            prefix + "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, EMBED),
            prefix + "self_attn.o_proj.weight": weight(EMBED, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": weight(MLP, EMBED),
            prefix + "mlp.up_proj.weight": weight(MLP, EMBED),
            prefix + "mlp.down_proj.weight": weight(EMBED, MLP),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
