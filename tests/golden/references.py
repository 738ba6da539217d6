"""Tiny models of every family, made and run by transformers on torch CPU in float32: the trusted side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import jdisagg

NUM_GENERATED = 64
DEMO = Path(jdisagg.__file__).parent / "demo"
DEMO_PROMPTS = (  # the first that a deterministic continuation does not soon turn into a loop is taken
    "import argparse\nimport os\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser(description=",
    'class Request:\n    """A single HTTP request.\n\n    The attributes are:\n',
    "def parse_header(line, default=None):\n    name, sep, value = line.partition(':')\n    if not sep:\n        raise",
    "# Errors raised by this module\n\nclass Error(Exception):\n    pass\n\nclass ",
)
MIN_DISTINCT = 24
PROMPT_LEN = 45  # not a multiple of any tile, chunk or page here
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
    "initializer_range": 0.25,  # large: small random weights just repeat the last prompt token
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_MIXED_WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-3-rope": ("Llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 12}),  # far shorter than the prompt
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": ("Qwen2", {"tie_word_embeddings": False, **_MIXED_WINDOWS}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-yarn-rope": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
}


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one model."""

    directory: Path  # config.json and model.safetensors
    prompt: tuple[int, ...]
    greedy: tuple[int, ...]  # 64 tokens after the prompt
    logits: np.ndarray  # f32[len(prompt) + 64, V], teacher-forced over prompt + greedy


def make_reference(family: str, directory: Path) -> Reference:
    """Build, save and run one model."""
    prefix, overrides = FAMILIES[family]
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    torch.manual_seed(1)
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **overrides})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start as zeros and norms as ones: a missing one would not show
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return _run(model, directory, np.random.default_rng(2).integers(0, 256, PROMPT_LEN).tolist())


def demo_reference() -> Reference:
    """The model that ships with the package, on a prompt of its own kind."""
    model = transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    made = (_run(model, DEMO, tokenizer(prompt)["input_ids"]) for prompt in DEMO_PROMPTS)
    return next(reference for reference in made if len(set(reference.greedy)) >= MIN_DISTINCT)


def _run(model: Any, directory: Path, prompt: list[int]) -> Reference:
    tokens = list(prompt)
    with torch.no_grad():
        logits = torch.zeros(0)
        for _ in range(NUM_GENERATED + 1):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
    tokens = tokens[: len(prompt) + NUM_GENERATED]
    return Reference(directory, tuple(prompt), tuple(tokens[len(prompt) :]), logits.float().numpy())
