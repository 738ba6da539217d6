"""Tokens that stand beside tokenizer.json, and not in it, are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jdisagg.core.errors import ConfigError
from jdisagg.models.resolve import eos_token_ids
from jdisagg.text.tokenizer import Tokenizer

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NEW = ("<|im_start|>", "<|im_end|>")
TEXT = "hello <|im_start|>world<|im_end|> é€x </s> <|IM_START|> <|Im_end|>"
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ image_token }}{{ image }}{{ eos_token }}"}


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


def decoder(first: int, **flags: bool) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + index): token(text, **flags) for index, text in enumerate(NEW)}}


@pytest.fixture
def size(byte_level: Tokenizer) -> int:
    return byte_level.vocab_size


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}], ids=["as it is", "lowercase"])
@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {}, MAP: NAMED},
        {MAP: NAMED},
        {CONFIG: {"bos_token": "</s>", "eos_token": "<s>"}, MAP: {**NAMED, "eos_token": token("</s>")}},
        {CONFIG: {**NAMED, **decoder(0, special=True)}, MAP: {"bos_token": "</s>"}},
        {CONFIG: {**NAMED, "added_tokens_decoder": {"256": token("é€x", special=True)}}},
        {CONFIG: {**NAMED, **decoder(0, special=False)}},
        {CONFIG: NAMED, ADDED: {NEW[1]: 1, NEW[0]: 0, "é€x": 256}},
        {CONFIG: {**NAMED, "eos_token": NEW[1]}, ADDED: {NEW[1]: 1, NEW[0]: 0}},
        {CONFIG: {**NAMED, "additional_special_tokens": NEW}},
        {CONFIG: NAMED, MAP: {"additional_special_tokens": NEW}},
        {CONFIG: {**NAMED, "extra_special_tokens": [*NEW, "</s>"]}},
        {CONFIG: {**NAMED, "extra_special_tokens": {"image_token": NEW[0]}}},
        {CONFIG: {**NAMED, "image_token": NEW[0]}},
        {CONFIG: {**NAMED, "model_specific_special_tokens": {"image": NEW[0]}}},
        {CONFIG: {**NAMED, **decoder(0, special=True), "split_special_tokens": True}},
    ],
    ids=lambda files: str(files).replace("é€x", "odd"),  # pytest escapes others anew each time that a process collects them
)
def test_they_encode_decode_and_render_as_in_transformers(
    byte_level_directory: Path, tmp_path: Path, size: int, files: dict[str, dict[str, Any]], normalizer: dict[str, str] | None
) -> None:
    """What special tokens are is written as it is found; others may be looked for in lower case."""
    raw = json.loads((byte_level_directory / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    for name, content in files.items():
        kept: dict[str, Any] = {key: value + size if name == ADDED and key in NEW else value for key, value in content.items()}
        if name == CONFIG:
            kept = kept | TEMPLATE
            tokens = kept.get("added_tokens_decoder", {})
            if "0" in tokens:
                kept["added_tokens_decoder"] = {str(int(key) + size): value for key, value in tokens.items()}
        (tmp_path / name).write_text(json.dumps(kept))
    ours, theirs = Tokenizer.from_directory(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = theirs(TEXT)["input_ids"]
    assert list(ours.encode(TEXT)) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    stream = ours.detokenizer()
    assert "".join(map(stream.push, ids)) + stream.flush() == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    if ours.chat is not None:
        assert ours.chat.render([{"content": "hi"}]) == theirs.apply_chat_template([{"content": "hi"}], tokenize=False)


def test_no_token_stands_for_more_characters_than_is_said(byte_level_directory: Path, tmp_path: Path, size: int) -> None:
    """A longer text of as many tokens would be refused unread."""
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    text = "<a token that is longer than any other>"
    (tmp_path / ADDED).write_text(json.dumps({text: size}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode(text * 9, add_special_tokens=False) == (size,) * 9
    assert tokenizer.max_token_characters == len(text)


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {}, MAP: {"eos_token": "</s>"}},
        {CONFIG: {"eos_token": "<new>"}, ADDED: {"<new>": 1}},
        {CONFIG: {"eos_token": "<new>", "added_tokens_decoder": {"1": token("<new>")}}},
        {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {}}, MAP: {"eos_token": "<s>"}},
    ],
    ids=str,
)
def test_an_end_that_they_name_ends_a_sequence(byte_level_directory: Path, tmp_path: Path, files: dict[str, Any]) -> None:
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == (1,)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (CONFIG, {"added_tokens_decoder": [NEW]}),
        (CONFIG, {"added_tokens_decoder": {"3": NEW[0]}}),
        (CONFIG, {"added_tokens_decoder": {"x": token(NEW[0])}}),
        (CONFIG, {"added_tokens_decoder": {"3": {"content": 5}}}),
        (ADDED, {"<new>": "3"}),
        (CONFIG, {"additional_special_tokens": "<a>"}),
        (CONFIG, {"additional_special_tokens": 5}),
        (CONFIG, {"extra_special_tokens": True}),
        (CONFIG, {"extra_special_tokens": [5]}),
        (CONFIG, {"extra_special_tokens": ["<a>", "\ud800"]}),
        (CONFIG, {"extra_special_tokens": {"image_token": "\udfff"}}),
        (CONFIG, {"eos_token": "a\ud800"}),
        (CONFIG, {"image_token": "\ud800"}),
        (CONFIG, {"added_tokens_decoder": {"3": {"content": "\ud800"}}}),
        (ADDED, {"\ud800": 3}),
    ],
    ids=str,
)
def test_what_is_no_token_is_refused(byte_level_directory: Path, tmp_path: Path, file: str, content: Any) -> None:
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"^{file}: "):
        Tokenizer.from_directory(tmp_path)


def test_a_key_of_the_config_is_not_taken_for_the_file_beside_it(byte_level_directory: Path, tmp_path: Path) -> None:
    shutil.copy(byte_level_directory / "tokenizer.json", tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**decoder(0, special=True), "added_tokens": 5}))
    assert Tokenizer.from_directory(tmp_path).encode(NEW[0], add_special_tokens=False)
