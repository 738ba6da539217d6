"""The shipped demo: its tokenizer loses nothing, its chat template is the trained one, its card tells the truth."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from demo_model.chat import SPECIAL_TOKENS, render
from demo_model.evaluate import held_out_scores, task_texts
from demo_model.export import LAYER_NAMES
from demo_model.net import Params, Shape
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer as BackendTokenizer

from jdisagg.models.resolve import resolve_model
from jdisagg.text.tokenizer import Tokenizer

DEMO = resolve_model("demo")
TASK = Path("configs/eval/perplexity.jsonl")
TOKENIZER = Tokenizer.from_directory(DEMO)


def import_weights(directory: Path, shape: Shape) -> Params:
    """The weights of an exported directory, as float32."""
    tensors = {name: t.astype(np.float32) for name, t in load_file(str(directory / "model.safetensors")).items()}
    layers = [
        {name: tensors[f"model.layers.{index}.{full}.weight"].T for name, full in LAYER_NAMES.items()}
        for index in range(shape.num_hidden_layers)
    ]
    return {"embed": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"], "layers": layers}


@given(text=st.text(max_size=60) | st.sampled_from(["\tdef f():\r\n\n    return 1", "naïve → \U0001f600 日本", " \n \n"]))
def test_every_text_survives_its_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == SPECIAL_TOKENS.index("<s>")
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids[1:], skip_special_tokens=False) == text


def test_python_takes_about_three_and_a_half_bytes_a_token() -> None:
    text = "".join(module.text for module in task_texts(TASK))
    assert 3.0 < len(text.encode()) / len(TOKENIZER.encode(text)) < 4.5


def test_chat_template_writes_what_training_wrote() -> None:
    messages = [
        {"role": "system", "content": "You write Python code."},
        {"role": "user", "content": "Write `f`."},
        {"role": "assistant", "content": "pass"},
    ]
    assert TOKENIZER.chat is not None
    assert TOKENIZER.chat.render(messages, add_generation_prompt=False) == "<s>" + render(messages)
    assert TOKENIZER.chat.render(messages[:2], add_generation_prompt=True).endswith("`f`.<|end|>\n<|assistant|>\n")


def test_end_of_turn_and_of_text_end_a_generation() -> None:
    config = json.loads((DEMO / "generation_config.json").read_text("utf-8"))
    assert [SPECIAL_TOKENS[i] for i in config["eos_token_id"]] == ["</s>", "<|end|>"]


def test_card_tells_the_bits_per_byte_that_the_weights_have() -> None:
    card = (DEMO / "README.md").read_text("utf-8")
    found = re.search(r"harder: ([\d.]+) bits per byte", card)
    assert found is not None
    shape = Shape()
    weights = import_weights(DEMO, shape)
    backend = BackendTokenizer.from_file(str(DEMO / "tokenizer.json"))
    scores = held_out_scores(weights, shape, backend, task_texts(TASK))
    assert scores.files == 3
    assert scores.bits_per_byte == pytest.approx(float(found[1]), abs=2e-3)
    assert scores.bits_per_byte < scores.xz
    one = task_texts(TASK)[:1]
    before = held_out_scores(weights, shape, backend, one).bits_per_byte
    weights["layers"] = weights["layers"][::-1]  # the number does depend on the weights
    assert held_out_scores(weights, shape, backend, one).bits_per_byte > before + 0.1
