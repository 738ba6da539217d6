"""KV in host memory: pieces of sequences that gave up their pages, until they get pages again or end.

An offload starts a device-to-host copy and does not wait; `settle` takes the bytes over, once the step after it is collected,
and lets the device arrays go. A restore of a copy that has not settled uses the device arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


class HostCopies:
    """Pieces [L, T, K, F] by key (request id), in token order."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Any]] = {}
        self._unsettled: set[str] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    def keep(self, key: str, pieces: list[jax.Array]) -> None:
        """Start copying fresh arrays to the host."""
        for piece in pieces:
            piece.copy_to_host_async()
        self._pieces[key] = list(pieces)
        self._unsettled.add(key)

    def settle(self) -> None:
        """Replace device arrays by host ones; waits for copies that are still under way."""
        for key in self._unsettled:
            self._pieces[key] = [np.asarray(piece) for piece in self._pieces[key]]
        self._unsettled.clear()

    def take(self, key: str) -> list[Any]:
        """The pieces, which are not kept any longer."""
        self._unsettled.discard(key)
        return self._pieces.pop(key)

    def forget(self, key: str) -> None:
        """Drop a copy nobody will ask for."""
        self.take(key)
