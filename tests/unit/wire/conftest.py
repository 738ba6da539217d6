from __future__ import annotations

import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import train_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(train_byte_level(tmp_path_factory.mktemp("tiny")))
