"""Backend "grpc": pieces are kept as bytes on P and read through `PeerService.Fetch`. Works between any two processes.

The store is shared by three threads without a lock: each operation on it is one dict operation, and `put` looks again after
it stored, so a piece discarded meanwhile leaves nothing behind.
"""

from __future__ import annotations


class PieceStore:
    """Bytes of published pieces by key, at most `max_bytes` (a single larger piece is taken when the store is empty)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}  # from reserve to discard
        self._bytes: dict[str, bytes | memoryview] = {}  # from put to discard

    def reserve(self, key: str, num_bytes: int) -> bool:
        """Take room for a piece whose bytes come later; False when there is none."""
        used = self.num_bytes
        if used and used + num_bytes > self._max_bytes:
            return False
        self._sizes[key] = num_bytes
        return True

    def put(self, key: str, data: bytes | memoryview) -> bool:
        """Store the bytes of a reserved piece; False when it was discarded meanwhile."""
        self._bytes[key] = data
        if key in self._sizes:
            return True
        self._bytes.pop(key, None)
        return False

    def locator(self, key: str) -> str:
        """The key is enough."""
        return ""

    def get(self, key: str) -> bytes | memoryview | None:
        """The bytes, or None when the piece is unknown, not there yet, or discarded. Any thread."""
        return self._bytes.get(key)

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        self._sizes.pop(key, None)
        self._bytes.pop(key, None)

    def close(self) -> None:
        """Free everything."""
        self._sizes.clear()
        self._bytes.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(list(self._sizes.values()))
