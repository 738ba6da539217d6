"""How many bytes a publisher may hold, and for which pieces.

Written by the engine thread, and by the transfer thread for a piece that failed; read by both, without a lock: every
operation is one dict operation.
"""

from __future__ import annotations


class Room:
    """At most `max_bytes`; a single larger piece is taken when there is nothing else."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # from take to free

    def take(self, key: str, num_bytes: int) -> bool:
        """Room for a piece whose bytes come later; False when there is none."""
        used = self.num_bytes
        if used and used + num_bytes > self._max_bytes:
            return False
        self._sizes[key] = num_bytes
        return True

    def free(self, key: str) -> bool:
        """Give it back; whether there was something to give back."""
        return self._sizes.pop(key, None) is not None

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    @property
    def keys(self) -> list[str]:
        """Pieces that have room."""
        return list(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes taken."""
        return sum(list(self._sizes.values()))
