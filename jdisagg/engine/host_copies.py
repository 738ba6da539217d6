"""KV in host memory: pieces of sequences that gave up their pages, until they get pages again or end.

An offload starts a device-to-host copy and does not wait; `settle` takes the bytes over, once the step after it is collected,
and lets the device arrays go. Those are memory beside the pool, of which a long sequence would take as much again as its pages:
where more than MOST_BYTES are under way, the oldest are waited for at once. On the way back no more lie beside the pool either:
before the next is put there the runner waits until they are in their pages. A restore of a copy that has not settled uses the
device arrays. What pads the last piece on the device is not kept on the host: --host-kv-bytes counts tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.kv.group import KVGroup

MOST_BYTES = 2**29  # 4,000 tokens of an 8B model; `sizing.moving_bytes` keeps room for them beside a pool, out and back


@dataclass(slots=True, eq=False)
class _Copy:
    pieces: list[KVGroup]
    num_tokens: int  # of all of them


class HostCopies:
    """Pieces [L, T, K, F] of T = `chunk_tokens`, with their scales, by key (request id), in token order."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._copies: dict[str, _Copy] = {}
        self._under_way = deque[tuple[_Copy, int]]()  # pieces on the device, the oldest first
        self._bytes_under_way = 0

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, key: str, pieces: Iterable[KVGroup], num_tokens: int) -> None:
        """Start copying fresh arrays, which hold `num_tokens` in all, to the host. Each is asked for when there is room for it
        on the device."""
        copy = self._copies[key] = _Copy([], num_tokens)
        for piece in pieces:
            for array in jax.tree.leaves(piece):
                array.copy_to_host_async()
            self._under_way.append((copy, len(copy.pieces)))
            self._bytes_under_way += bytes_of(piece)
            copy.pieces.append(piece)
            while self._bytes_under_way + bytes_of(piece) > MOST_BYTES and self._under_way:
                self._land()

    def settle(self) -> None:
        """Replace device arrays by host ones; waits for copies that are still under way."""
        while self._under_way:
            self._land()

    def take(self, key: str) -> list[KVGroup]:
        """The pieces, padded as they came, which are not kept any longer."""
        *pieces, last = self._remove(key).pieces
        return [*pieces, jax.tree.map(self._padded, last)]

    def forget(self, key: str) -> None:
        """Drop a copy nobody will ask for."""
        self._remove(key)

    def _remove(self, key: str) -> _Copy:
        copy = self._copies.pop(key)
        self._under_way = deque(one for one in self._under_way if one[0] is not copy)
        self._bytes_under_way = sum(bytes_of(other.pieces[index]) for other, index in self._under_way)
        return copy

    def _land(self) -> None:
        """The oldest piece that is under way is on the host."""
        copy, index = self._under_way.popleft()
        self._bytes_under_way -= bytes_of(copy.pieces[index])
        copy.pieces[index] = jax.device_get(copy.pieces[index])
        if index == (copy.num_tokens - 1) // self._chunk_tokens:
            copy.pieces[index] = jax.tree.map(self._trimmed(copy.num_tokens), copy.pieces[index])

    def _trimmed(self, num_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
        num_last = (num_tokens - 1) % self._chunk_tokens + 1
        return lambda array: array if num_last == self._chunk_tokens else array[:, :num_last].copy()

    def _padded(self, array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Of a last piece; one that is still on the device was never trimmed."""
        missing = self._chunk_tokens - array.shape[1]
        return np.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else array


def bytes_of(piece: KVGroup) -> int:
    """Of its arrays, what pads it included."""
    return sum(array.nbytes for array in piece.arrays)
