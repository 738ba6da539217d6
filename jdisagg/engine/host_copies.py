"""KV in host memory: pieces of sequences that gave up their pages, until they get pages again or end.

An offload starts a device-to-host copy and does not wait; `settle` takes the bytes over, once the step after it is collected,
and lets the device arrays go. A restore of a copy that has not settled uses the device arrays. What pads the last piece on the
device is not kept on the host: --host-kv-bytes counts tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.kv.group import KVGroup


@dataclass(slots=True)
class _Copy:
    pieces: list[KVGroup]
    num_tokens: int  # of all of them
    is_settled: bool = False


class HostCopies:
    """Pieces [L, T, K, F] of T = `chunk_tokens`, with their scales, by key (request id), in token order."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._copies: dict[str, _Copy] = {}
        self._unsettled: set[str] = set()

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, key: str, pieces: list[KVGroup], num_tokens: int) -> None:
        """Start copying fresh arrays, which hold `num_tokens` in all, to the host."""
        for array in jax.tree.leaves(pieces):
            array.copy_to_host_async()
        self._copies[key] = _Copy(list(pieces), num_tokens)
        self._unsettled.add(key)

    def settle(self) -> None:
        """Replace device arrays by host ones; waits for copies that are still under way."""
        for key in self._unsettled:
            copy = self._copies[key]
            copy.pieces = jax.device_get(copy.pieces)
            copy.pieces[-1] = jax.tree.map(self._trimmed(copy.num_tokens), copy.pieces[-1])
            copy.is_settled = True
        self._unsettled.clear()

    def take(self, key: str) -> list[KVGroup]:
        """The pieces, padded as they came, which are not kept any longer."""
        self._unsettled.discard(key)
        copy = self._copies.pop(key)
        return [*copy.pieces[:-1], jax.tree.map(self._padded, copy.pieces[-1]) if copy.is_settled else copy.pieces[-1]]

    def forget(self, key: str) -> None:
        """Drop a copy nobody will ask for."""
        self._unsettled.discard(key)
        del self._copies[key]

    def _trimmed(self, num_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
        num_last = (num_tokens - 1) % self._chunk_tokens + 1
        return lambda array: array if num_last == self._chunk_tokens else array[:, :num_last].copy()

    def _padded(self, array: np.ndarray) -> np.ndarray:
        missing = self._chunk_tokens - array.shape[1]
        return np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else array
