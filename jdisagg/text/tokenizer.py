"""Text to token ids and back, from the files of a Hugging Face directory.

The Rust `tokenizers` library does the work; this class adds what tokenizer_config.json says about it (special tokens,
chat template) and what logprobs need: the exact bytes of one token. Whether BOS / EOS are put around a prompt is decided by
the post-processor in tokenizer.json alone, as in transformers 5 (`add_bos_token` in tokenizer_config.json is history).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from jdisagg.core.errors import ConfigError
from jdisagg.text.bytelevel import ByteLevelVocabulary
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer, begun_character
from jdisagg.text.tokenizer_files import add_tokens, decoder_of, read, read_tokenizer_config, special_tokens

ADDITIONAL_TEMPLATES = "additional_chat_templates"  # a folder of the model's directory: NAME.jinja
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"


class Tokenizer:
    """One model's tokenizer. Immutable after construction; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        chat_templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`config`: see `read_tokenizer_config`; `chat_templates`, by name, win over those inside it."""
        config = config or {}
        os.environ.setdefault(_PARALLELISM_VARIABLE, "false")  # one text at a time has no use for a thread per core
        self._backend = backend
        self.special_tokens = special_tokens(config)
        add_tokens(backend, config)
        backend.encode_special_tokens = config.get("split_special_tokens") is True  # their names in a text are letters then
        backend.no_truncation()  # both may be saved in tokenizer.json and are for training
        backend.no_padding()
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        templates = self._templates = chat_templates or _named_templates(config.get("chat_template"))
        template = templates.get("default", next(iter(templates.values()), None))
        self.chat = None if template is None else ChatTemplate(template, self.special_tokens, templates.get("tool_use"))
        decoder, vocabulary = decoder_of(backend), backend.get_vocab(with_added_tokens=True)
        self.max_token_characters = max(map(len, vocabulary), default=1)
        self._bytes = ByteLevelVocabulary(backend) if _is_byte_level(decoder) else None
        self._byte_of = _fallback_bytes(vocabulary) if _has_byte_fallback(decoder) else {}

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, what stands beside it (`tokenizer_files`), chat_template.jinja and
        additional_chat_templates/NAME.jinja. Raises ConfigError when the first is missing, or one that is there cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {directory}: convert the tokenizer to the fast format and save it there")
        config, template_path = read_tokenizer_config(directory), directory / "chat_template.jinja"
        files = {"default": template_path} if template_path.is_file() else {}
        files |= {file.stem: file for file in sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
        return cls(read(path, _read_backend), config, {name: read(file, _read_text) for name, file in files.items()})

    @classmethod
    def from_directory_if_there(cls, directory: Path) -> Tokenizer | None:
        """None where there is no tokenizer.json; raises ConfigError for one that cannot be read."""
        return cls.from_directory(directory) if (directory / "tokenizer.json").is_file() else None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """As tokenizer.json has it, with the tokens that stand beside it."""
        return self._backend.to_str()

    def digest(self) -> str:
        """Hexadecimal; equal for tokenizers of one vocabulary, one set of special tokens and one chat template, whichever
        version of the library reads them."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        what: list[Any] = [sorted(vocabulary.items()), sorted(self.special_tokens.items()), sorted(self._templates.items())]
        if self._backend.encode_special_tokens:
            what.append("split_special_tokens")
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None, keeps_beginning: bool = False
    ) -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens` puts BOS / EOS around it where the model was trained so. `most`: of more of
        them those around it and its last ones, or its first ones (`keeps_beginning`)."""
        # of the library's functions only those for batches let other threads run: a megabyte takes a second
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is None or len(encoding.ids) <= most:
            return tuple(encoding.ids)
        of_text = [index for index, is_around in enumerate(encoding.special_tokens_mask) if not is_around]
        num = len(encoding.ids) - most
        left_out = set(of_text[-num:] if keeps_beginning else of_text[:num])
        return tuple([token_id for index, token_id in enumerate(encoding.ids) if index not in left_out][:most])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)  # see encode
        return text

    def decode_begun(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` for a text that goes on: without the character at its end of which only a part is there, which
        `detokenizer(before=token_ids)` will give."""
        if self._bytes is None:
            skip = self.special_ids if skip_special_tokens else frozenset()
            kept = [token_id for token_id in token_ids if token_id not in skip]
            begun = begun_character(token_ids, self._byte_of, skip)
            return self.decode(kept[: len(kept) - len(begun)], skip_special_tokens=False)
        text = self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        left = self.detokenizer(skip_special_tokens=skip_special_tokens, before=token_ids).flush()
        return text[: len(text) - len(left)]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, before: Sequence[int] = (), shown: Collection[str] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder for one stream; `before`: the tokens that it goes on with, as a prompt's; `shown`: those
        special tokens that are not skipped."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if shown:
            skip -= {self.token_id(token) for token in shown}
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes.token_bytes, skip, before=before)
        return WindowDetokenizer(
            lambda ids: self._backend.decode(ids, skip_special_tokens=False), skip, byte_of=self._byte_of, before=before
        )

    def token_id(self, token: str) -> int | None:
        """Id of one vocabulary entry, written as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token contributes in the middle of a text; special tokens contribute their name."""
        if self._bytes is not None:
            return self._bytes.token_bytes(token_id)
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if (byte := self._byte_of.get(token_id)) is not None:
            return bytes((byte,))
        if token_id in self.special_ids:
            return token.encode()
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _read_text(path: Path) -> str:
    return path.read_text("utf-8")


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no type of its own for it
        raise ValueError(error) from error


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder of tokenizer.json is ByteLevel, or a sequence of it and of what only joins."""
    parts = [part.get("type") for part in decoder.get("decoders", [decoder])]
    return [part for part in parts if part != "Fuse"] == ["ByteLevel"]


def _has_byte_fallback(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder of tokenizer.json, or one of those it is made of, reads `<0xF0>` as a byte."""
    return decoder.get("type") == "ByteFallback" or any(map(_has_byte_fallback, decoder.get("decoders", ())))


def _fallback_bytes(vocabulary: Mapping[str, int]) -> dict[int, int]:
    matches = ((_BYTE_FALLBACK.fullmatch(token), token_id) for token, token_id in vocabulary.items())
    return {token_id: int(match[1], 16) for match, token_id in matches if match is not None}


def _named_templates(entry: Any) -> Mapping[str, str]:
    """tokenizer_config.json holds one template, or named ones: a list or an object. Raises ConfigError for anything else."""
    named: dict[Any, Any] = {} if entry is None else entry if isinstance(entry, dict) else {"default": entry}
    if isinstance(entry, list):
        objects = [item if isinstance(item, dict) else {} for item in entry]
        named = {item.get("name"): item.get("template") for item in objects}
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in named.items()):
        raise ConfigError("tokenizer_config.json: chat_template is neither a text nor a list of objects with name and template")
    return named
