"""The arrays of one KV group: the pool's, or rows of tokens taken from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVGroup:
    """Data and, when they are int8, their scales: arrays of equal shape but for the last axis, F and 2.

    In the pool they have the layout's axis order; as rows they are [L, T, K, F] and [L, T, K, 2].
    """

    data: Any  # jax.Array (np.ndarray in host memory); kv dtype, or its bits
    scales: Any | None = None  # float32; one for the keys, one for the values of a (layer, token, head)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """(data,) or (data, scales)."""
        return (self.data,) if self.scales is None else (self.data, self.scales)
