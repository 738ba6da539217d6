"""A start for which a device has no memory left ends with a line that says what to change, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jdisagg.core.errors import ConfigError, NoMemory


@contextmanager
def wants_memory(told: str, refusal: type[ConfigError] = NoMemory) -> Iterator[None]:
    """Raises `refusal`, with `told` and what the runtime says, where that refuses memory inside."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # jax's own, or what a backend made of it
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise refusal(f"{told} ({str(error).splitlines()[0]})") from error
