"""Backend "grpc": pieces are kept as bytes on P and read through `PeerService.Fetch`. Works between any two processes."""

from __future__ import annotations


class PieceStore:
    """Bytes of published pieces by key. Shared by two threads without a lock: each operation is one dict operation."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytes | memoryview] = {}  # from put to discard

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Store the bytes; the key is all that is needed to get them."""
        self._bytes[key] = data
        return ""

    def get(self, key: str) -> bytes | memoryview | None:
        """The bytes, or None when the piece is unknown, not there yet, or discarded. Any thread."""
        return self._bytes.get(key)

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        self._bytes.pop(key, None)

    def close(self) -> None:
        """Free everything."""
        self._bytes.clear()
