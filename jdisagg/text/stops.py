"""Stop strings over text that arrives in pieces.

Text that may turn out to be the beginning of a stop string is withheld until it is decided. The match that *ends* first wins
(then the one that begins first), so the result does not depend on how the text was cut into pieces. Each character is looked at
once or twice for each stop string, however long those are and however much is withheld (Knuth, Morris and Pratt, 1977).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property


class Stop:
    """A stop string; all choices of a request share it."""

    def __init__(self, text: str) -> None:
        """`text` is not empty."""
        assert text, "a stop string is empty"
        self.text = text

    @cached_property
    def shorter(self) -> list[int]:
        """For each beginning of the text, by its length less one: the length of the longest shorter one that it ends with."""
        lengths, length = [0], 0
        for character in self.text[1:]:
            while length and character != self.text[length]:
                length = lengths[length - 1]
            length += character == self.text[length]
            lengths.append(length)
        return lengths

    def scan(self, text: str, length: int) -> tuple[int, int | None]:
        """Go on from a beginning of `length` characters that has been seen: how long the one is that `text` ends with, and the
        first index behind a whole one in `text`."""
        if not length and self.text[0] not in text:
            return 0, None
        end = None
        for index, character in enumerate(text, start=1):
            while length and character != self.text[length]:
                length = self.shorter[length - 1]
            length += character == self.text[length]
            if length == len(self.text):
                end = index if end is None else end
                length = self.shorter[length - 1]
        return length, end


class StopStrings:
    """One stream's stop strings. After a match nothing more is released."""

    def __init__(self, stops: Sequence[Stop], *, are_shown: bool = False) -> None:
        """`are_shown`: a match is released, too, as the end of the text."""
        self.are_shown = are_shown
        self._stops = tuple(stops)
        self._seen = [0] * len(self._stops)  # characters of each that the text so far ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text; returns what may be shown now, up to the stop string when `matched` becomes set. `may_end` False: no match
        ends within this text, though one may begin in it."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer, ends = self._held + text, list[tuple[int, int, str]]()
        for number, stop in enumerate(self._stops):
            self._seen[number], end = stop.scan(text, self._seen[number])
            if end is not None and may_end:
                ends.append((len(self._held) + end, len(self._held) + end - len(stop.text), stop.text))
        if ends:
            end, begin, self.matched = min(ends)
            self._held = ""
            return buffer[: end if self.are_shown else begin]
        keep = max(self._seen)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The withheld text: the stream ended and it did not become a stop string."""
        held, self._held = self._held, ""
        return held
