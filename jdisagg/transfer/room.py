"""Room beside a pool for pieces that arrive: what sizing keeps of a device for them, over whichever backends they come.

    take      before any of a piece is put onto the device: at once, or not at all
    Taken     the room of one piece, which goes along with it and is given back when nobody has it any more: the piece was
              imported or dropped, or did not come

The engine, which imports, waits for no room, and a piece waits for it before it takes any. What a backend fetches ahead of its
turn (only "jax", where that lies on the device) never takes all of it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque


class Room:
    """As many tokens of KV as the device has room for; None = any number. For every transfer thread of a worker."""

    def __init__(self, most_tokens: int | None = None) -> None:
        self._most_tokens = sys.maxsize if most_tokens is None else most_tokens
        self._taken_tokens = 0
        self._lock = threading.Lock()  # of takers
        self._given_back = deque[int]()  # and not counted off yet: that may happen anywhere, and takes no lock

    def take(self, num_tokens: int, *, is_ahead: bool = False) -> Taken | None:
        """Room for a piece that takes `num_tokens`, padding included; None = there is too little just now. What needs more
        than there ever is gets all. One that `is_ahead` of its turn leaves a half to others: what comes from another peer, and
        is joined where it arrives, takes two chunks."""
        num_tokens = min(num_tokens, self._most_tokens)
        with self._lock:
            while self._given_back:
                self._taken_tokens -= self._given_back.popleft()
            left_tokens = self._most_tokens - self._taken_tokens - num_tokens
            if left_tokens < (self._most_tokens // 2 if is_ahead else 0):
                return None
            self._taken_tokens += num_tokens
        return Taken(num_tokens, self._given_back)


class Taken:
    """Room that one piece takes, for as long as somebody has this."""

    __slots__ = ("_given_back", "_num_tokens")

    def __init__(self, num_tokens: int, given_back: deque[int]) -> None:
        self._num_tokens = num_tokens
        self._given_back = given_back

    def shrink(self, num_tokens: int) -> None:
        """It takes no more than `num_tokens` any more."""
        surplus = max(0, self._num_tokens - num_tokens)
        self._num_tokens -= surplus
        self._given_back.append(surplus)

    def __del__(self) -> None:
        self._given_back.append(self._num_tokens)
