"""A tiny real tokenizer, trained in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'break' %}{% break %}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if tools %}tools: {{ tools | tojson(indent=2) }}\n{% endif %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_byte_level(directory: Path) -> Path:
    """Write a byte-level BPE that puts BOS before a text, with a chat template; returns the directory."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog", "hello world"] * 8, trainer)
    backend.add_tokens([tokenizers.AddedToken("é€x", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    config["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory
