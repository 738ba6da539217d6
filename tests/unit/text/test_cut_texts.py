"""A text that is cut keeps its last tokens, or its first ones, and what is put around it: as transformers cuts on the left,
which is vLLM's way, or on the right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from jdisagg.text.tokenizer import Tokenizer

TEXTS = ["the quick brown fox 😀", "<s> the </s> fox </s>", "the", ""]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>", "<s> <s> $A </s>"])
def test_it_is_cut_as_transformers_cuts_it(byte_level_directory: Path, tmp_path: Path, around: str, side: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_directory / "tokenizer.json"))
    special: list[Any] = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)  # pyright: ignore[reportAttributeAccessIssue]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ours = Tokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, truncation_side=side)
    for text in TEXTS:
        for add in (True, False):
            whole = ours.encode(text, add_special_tokens=add)
            least = around.count("s>") if add else 0  # below it transformers fails, or does not cut
            for most in range(max(1, least), len(whole) + 3):
                cut = theirs(text, add_special_tokens=add, truncation=True, max_length=most)["input_ids"]
                kept = ours.encode(text, add_special_tokens=add, most=most, keeps_beginning=side == "right")
                assert list(kept) == cut
            assert len(ours.encode(text, add_special_tokens=add, most=1)) == min(1, len(whole))
