"""llguidance's tokenizer of a model, to which the name of a special token inside a text is text."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance


def read_tokenizer(tokenizer_json: str, size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Of at most `size` tokens. Raises ValueError when the library cannot read it."""
    eos = list(eos_token_ids)
    read = llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos, slices=[])  # nothing is matched with this one
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Plain(read, eos[0])), n_vocab=size, eos_token=eos)


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
