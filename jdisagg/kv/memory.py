"""A start for which a device has no memory left is a bad configuration, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jdisagg.core.errors import ConfigError


@contextmanager
def wants_memory(told: str) -> Iterator[None]:
    """Raises ConfigError, `told` and what the runtime says, where that refuses memory inside."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(f"{told} ({str(error).splitlines()[0]})") from error
