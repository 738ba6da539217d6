"""A model with random weights and real sizes, as a directory that `--load-format dummy` serves."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

from jdisagg.models.resolve import read_config, resolve_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_FIRST_PLAIN_TOKEN = 16  # smaller ids may be special


def write_model(directory: Path, sizes: Mapping[str, object]) -> Path:
    """The demo model's config.json with other `sizes`, and its tokenizer, in `directory` (created and returned)."""
    directory.mkdir(parents=True, exist_ok=True)
    demo = resolve_model("demo")
    for name in _TOKENIZER_FILES:
        shutil.copy(demo / name, directory / name)
    (directory / "config.json").write_text(json.dumps({**read_config(demo), **sizes}, indent=1))
    return directory


class Prompts:
    """Random token ids: no two prompts share a prefix, so no cache helps, and equal seeds give equal prompts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = int(read_config(resolve_model("demo"))["vocab_size"])

    def next(self, num_tokens: int) -> list[int]:
        """The next prompt."""
        return self._random.choices(range(_FIRST_PLAIN_TOKEN, self._vocab_size), k=num_tokens)
