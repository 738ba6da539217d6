"""The printable alphabet in which byte-level BPE vocabularies write arbitrary bytes, undone."""

from __future__ import annotations

import tokenizers


class ByteLevelVocabulary:
    """Token id to bytes, for tokenizers whose decoder is ByteLevel. Reads each token once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._byte_of = _byte_of_character()
        self._cache: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; an id outside the vocabulary has none."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._spell(self._backend.id_to_token(token_id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        """Added tokens may hold characters outside the alphabet; such a token stands for its own UTF-8."""
        codes = [self._byte_of.get(character) for character in token]
        return token.encode() if None in codes else bytes(code for code in codes if code is not None)


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
