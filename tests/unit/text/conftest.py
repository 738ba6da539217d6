"""Tiny real tokenizers, loaded anew by each test: whatever loading does, all of them try it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import train_byte_level


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE that puts BOS before a text, with a chat template, as files."""
    return train_byte_level(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture
def byte_level(byte_level_directory: Path) -> Tokenizer:
    """The same, loaded."""
    return Tokenizer.from_directory(byte_level_directory)


@pytest.fixture
def byte_fallback() -> Tokenizer:
    """SentencePiece style: words begin with U+2581, unknown characters fall back to bytes."""
    words = ["<s>", "</s>", "<unk>", "\u2581", "\u2581hello", "\u2581world", "he", "llo", "\ufffd"]
    words += [f"<0x{i:02X}>" for i in range(256)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
