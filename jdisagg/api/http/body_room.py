"""The memory that bodies take while they come in, all of this process together: 16 MiB each, and as many as there are
connections, would be more than a machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jdisagg.core.errors import Overloaded

MAX_BYTES = 2**29
_RETRY_AFTER_S = 5.0


class BodyRoom:
    """Counts what has come of bodies that are not whole yet. Use from one event loop."""

    def __init__(self) -> None:
        self._num_bodies = self._num_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For one body: call with the bytes of each part that came. That raises Overloaded when there is no room for it."""
        held = 0

        def add(num_bytes: int) -> None:
            nonlocal held
            if self._num_bytes + num_bytes > MAX_BYTES:
                coming = f"{self._num_bodies} requests of {self._num_bytes} bytes together are being received"
                raise Overloaded(f"{coming}; come again", retry_after_s=_RETRY_AFTER_S)
            held += num_bytes
            self._num_bytes += num_bytes

        self._num_bodies += 1
        try:
            yield add
        finally:
            self._num_bodies -= 1
            self._num_bytes -= held
