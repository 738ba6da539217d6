"""The implementations that every kernel of this package has, and what they refuse."""

from __future__ import annotations

from typing import Literal

import jax

Implementation = Literal["ref", "tpu", "gpu"]
Shaped = jax.Array | jax.ShapeDtypeStruct  # whose shape and dtype alone are looked at


class Refused(ValueError):
    """What an implementation does not do, and why; `ref` does."""
