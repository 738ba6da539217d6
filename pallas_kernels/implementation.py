"""The implementations that every kernel of this package has."""

from __future__ import annotations

from typing import Literal

Implementation = Literal["ref", "tpu", "gpu"]


class Refused(ValueError):
    """What an implementation does not do, and why; `ref` does."""
