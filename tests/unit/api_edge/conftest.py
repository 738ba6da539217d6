"""One tiny tokenizer for all."""

from __future__ import annotations

import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import train_byte_level


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with BOS and a chat template."""
    return Tokenizer.from_directory(train_byte_level(tmp_path_factory.mktemp("tiny")))
