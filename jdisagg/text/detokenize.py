"""Token ids to text, one at a time, never emitting half a character.

`ByteDetokenizer` is exact: the pieces of any token sequence join to what decoding it at once gives, also where a prompt came
before and ended within a character. `WindowDetokenizer` serves every other decoder (SentencePiece with byte fallback, ..): it
decodes a short window twice and emits the difference. Its first window is the end of the prompt: a decoder drops the space that
a text begins with, and an answer goes on with one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 8  # a character has at most 4 bytes, so at most 4 tokens; beyond this the bytes are plainly invalid
_CONTEXT_TOKENS = 6  # decoded again for context: leading-space rules look at neighbours only


class Detokenizer(Protocol):
    """Incremental decoder of one stream."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end of the stream; an unfinished character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. O(bytes of the token) per push."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skip: Collection[int] = frozenset(), *, before: Sequence[int] = ()
    ) -> None:
        """`before`: what the stream goes on with; a character that it begins and does not end belongs to the stream."""
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in before[-_MAX_PENDING_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        return "" if token_id in self._skip else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._utf8.decode(b"", final=True)


def begun_character(token_ids: Sequence[int], byte_of: Mapping[int, int], skip: Collection[int]) -> bytes:
    """Of a text that goes on: the bytes, each a token's, of the character at its end of which only a part is there."""
    tail = list(takewhile(lambda token_id: token_id in byte_of, reversed(_last_kept(token_ids, skip))))
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(bytes(byte_of[token_id] for token_id in reversed(tail)))
    return utf8.getstate()[0]


def _last_kept(token_ids: Sequence[int], skip: Collection[int]) -> list[int]:
    """The last tokens that are text, behind which, and between which, there may be any number of others: as at the end of a
    chat's prompt, where a decoder that sees none of the text would take the answer for its beginning."""
    return [*islice((token_id for token_id in reversed(token_ids) if token_id not in skip), _CONTEXT_TOKENS)][::-1]


class WindowDetokenizer:
    """For any decoder. The window is bounded, so a push costs O(1) decodes of at most a dozen tokens.

    Tokens that spell one byte (`<0xF0>`) are put together here: of a run of them that a window cuts inside a character, a
    decoder makes U+FFFD throughout.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skip: Collection[int] = frozenset(),
        *,
        byte_of: Mapping[int, int] = MappingProxyType({}),
        before: Sequence[int] = (),
    ) -> None:
        """`byte_of`: the tokens that are bytes. `before`: what the stream goes on with; a character that it begins and does not
        end belongs to the stream."""
        self._decode = decode
        self._skip = skip
        self._byte_of = byte_of
        self._context = _last_kept(before, skip)  # already emitted
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(begun_character(before, byte_of, skip))
        self._pending: list[int] = []  # not yet

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if token_id in self._skip:
            return ""
        if (byte := self._byte_of.get(token_id)) is not None:
            text = self._emit_all()
            self._context = [*self._context, token_id][-_CONTEXT_TOKENS:]
            return text + self._utf8.decode(bytes((byte,)))
        text = self._utf8.decode(b"", final=True)
        self._pending.append(token_id)
        return text + self._emit(final=len(self._pending) >= _MAX_PENDING_TOKENS)

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._emit_all() + self._utf8.decode(b"", final=True)

    def _emit_all(self) -> str:
        return self._emit(final=True) if self._pending else ""

    def _emit(self, *, final: bool) -> str:
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        known = len(self._decode(self._context))
        self._context = (self._context + self._pending)[-_CONTEXT_TOKENS:]
        self._pending = []
        return text[known:]
