"""The end of an object in JSON whose text comes in pieces."""

from __future__ import annotations

import re

_MARK = re.compile(r'["\\{}]')


class Braces:
    """Counts those that are no part of a string."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # how many are open
        self._in_string = False
        self._escaped = False  # the text so far ends in a backslash that is one

    def end(self, text: str) -> int:
        """How much of it there is until none is open any more; all of it where that does not happen."""
        position = 0
        if self._escaped:
            self._escaped, position = False, 1
        while mark := _MARK.search(text, position):
            position = mark.end()
            match mark[0]:
                case "\\":
                    self._escaped = position == len(text)
                    position += 1
                case '"':
                    self._in_string = not self._in_string
                case brace if not self._in_string:
                    self.depth += 1 if brace == "{" else -1
                    if self.depth == 0:
                        return position
        return len(text)
