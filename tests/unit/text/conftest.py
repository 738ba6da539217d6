"""Tiny real tokenizers, trained in the fixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jdisagg.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {%- if message.role == 'break' %}{% break %}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if tools %}tools: {{ tools | tojson(indent=2) }}\n{% endif %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE that puts BOS before a text, with a chat template, as files."""
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
    directory = tmp_path_factory.mktemp("byte-level")
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    config["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: Path) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer.from_directory(byte_level_directory)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece style: words begin with U+2581, unknown characters fall back to bytes."""
    words = ["<s>", "</s>", "<unk>", "\u2581", "\u2581hello", "\u2581world", "he", "llo", *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
