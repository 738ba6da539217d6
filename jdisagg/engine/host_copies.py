"""KV in host memory: pieces of sequences that gave up their pages, until they get pages again or end.

An offload starts a device-to-host copy and does not wait; `settle` takes the bytes over, once the step after it is collected,
and lets the device arrays go. A restore of a copy that has not settled uses the device arrays.
"""

from __future__ import annotations

import jax

from jdisagg.kv.group import KVGroup


class HostCopies:
    """Pieces [L, T, K, F], with their scales, by key (request id), in token order."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[KVGroup]] = {}
        self._unsettled: set[str] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    def keep(self, key: str, pieces: list[KVGroup]) -> None:
        """Start copying fresh arrays to the host."""
        for array in jax.tree.leaves(pieces):
            array.copy_to_host_async()
        self._pieces[key] = list(pieces)
        self._unsettled.add(key)

    def settle(self) -> None:
        """Replace device arrays by host ones; waits for copies that are still under way."""
        for key in self._unsettled:
            self._pieces[key] = jax.device_get(self._pieces[key])
        self._unsettled.clear()

    def take(self, key: str) -> list[KVGroup]:
        """The pieces, which are not kept any longer."""
        self._unsettled.discard(key)
        return self._pieces.pop(key)

    def forget(self, key: str) -> None:
        """Drop a copy nobody will ask for."""
        self.take(key)
