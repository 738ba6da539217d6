"""A tiny random Llama as a Hugging Face directory, with the demo model's tokenizer: real files, seconds to compile.

Weights are larger than usual so that greedy streams vary instead of repeating one token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import jdisagg

DEMO = Path(jdisagg.__file__).parent / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 64, 4, 4, 16, 96


def make_tiny_model(directory: Path, *, seed: int = 0, max_model_len: int = 512, scale: float = 0.35) -> Path:
    """Write the model into `directory` (created) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (DEMO / name).exists():
            shutil.copy(DEMO / name, directory / name)
    demo = json.loads((DEMO / "config.json").read_text())
    vocab = demo["vocab_size"]
    config = {
        **demo,
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
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

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
