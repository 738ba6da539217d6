"""llguidance's tokenizer of a model, to which the name of a special token inside a text is text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import tokenizers
from tokenizers import decoders

from jdisagg.text.tokenizer_files import decoder_of

_METASPACE = "Metaspace"
_BYTE_FALLBACK = "ByteFallback"
_A_BYTE = "<0x0A>"  # all 256 are there, or none


def read_tokenizer(tokenizer_json: str, size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Of at most `size` tokens. Raises ValueError when the library cannot read it."""
    eos, known = list(eos_token_ids), _without_metaspace(tokenizer_json)
    read = llguidance.LLTokenizer(known, n_vocab=size, eos_token=eos, slices=[])  # nothing is matched with this one
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Plain(read, eos[0])), n_vocab=size, eos_token=eos)


def _without_metaspace(tokenizer_json: str) -> str:
    """The same tokenizer with a decoder of the parts that Llama's has, if it is a Metaspace, or a ByteFallback and one: the
    library refuses the former, and of the latter takes the character that stands for a space to be itself. But for the space
    that a text begins with, and an answer is no beginning, they decode alike."""
    if f'"{_METASPACE}"' not in tokenizer_json:
        return tokenizer_json
    backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    decoder = decoder_of(backend)
    parts: dict[str, Mapping[str, Any]] = {part["type"]: part for part in decoder.get("decoders", [decoder])}
    if _METASPACE not in parts:  # the pre-tokenizer is one
        return tokenizer_json
    if _BYTE_FALLBACK not in parts and backend.token_to_id(_A_BYTE) is not None:
        raise ValueError(
            f"its decoder, {_METASPACE} without {_BYTE_FALLBACK}, writes the token {_A_BYTE} as these six characters"
        )
    space = decoders.Replace(parts[_METASPACE]["replacement"], " ")
    known = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])
    backend.decoder = known
    return backend.to_str()


class _Plain:
    """What TokenizerWrapper wants. Where a grammar leaves one text, the library allows the tokens that the tokenizer makes of
    it: of `<|end|>` in a constant that would be the token of that name, which is no text, and its request would fail."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, eos_token_id: int) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special_token(token_id)]
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        token_ids = self._tokenizer.tokenize_str(text)
        return token_ids if self._special.isdisjoint(token_ids) else self._tokenizer.greedy_tokenize(text)
