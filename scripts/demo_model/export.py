"""Write the trained demo as an ordinary Hugging Face model directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from demo_model.chat import BOS, CHAT_TEMPLATE, END, EOS, SPECIAL_TOKENS
from demo_model.net import Params, Shape

LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def export_tokenizer(directory: Path, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template)."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def export_weights(directory: Path, params: Params, shape: Shape) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16; linears as [out, in])."""
    directory.mkdir(parents=True, exist_ok=True)
    bos, eos, end = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, END))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": [eos, end],
    }
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": bos, "eos_token_id": [eos, end], "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    _write_json(directory / "generation_config.json", generation)
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for index, layer in enumerate(params["layers"]):
        for name, weight in layer.items():
            tensors[f"model.layers.{index}.{LAYER_NAMES[name]}.weight"] = weight.T
    rounded = {name: np.ascontiguousarray(np.asarray(t).astype(ml_dtypes.bfloat16)) for name, t in tensors.items()}
    temporary = directory / "model.safetensors.tmp"
    save_file(rounded, str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)  # the writer makes it private
    temporary.replace(directory / "model.safetensors")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
