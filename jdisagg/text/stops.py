"""Stop strings over text that arrives in pieces.

Text that may turn out to be the beginning of a stop string is withheld until it is decided. The match that *ends* first wins
(then the one that begins first), so the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One stream's stop strings. After a match nothing more is released."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        assert all(stops), "a stop string is empty"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text; returns what may be shown now, without the stop string when `matched` becomes set. `may_end` False: no
        match ends within this text, though one may begin in it."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        ends = ((begin + len(stop), begin, stop) for stop in self._stops if (begin := self._find(buffer, stop)) >= 0)
        if may_end and (found := min(ends, default=None)) is not None:
            _, begin, self.matched = found
            self._held = ""
            return buffer[:begin]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The withheld text: the stream ended and it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, stop: str) -> int:
        """Where it begins that ends behind what was withheld; -1: nowhere."""
        return buffer.find(stop, max(0, len(self._held) - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
