"""Passes over whole files, which take minutes where these are large: what for is told, and signals are heard meanwhile."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from time import monotonic

log = logging.getLogger(__name__)

LONG_BYTES = 2**30  # takes seconds
LONGEST_S = 0.02  # on the event loop, which reads answers, too


def tell_of_pass(path: Path, why: str) -> None:
    """One line before a file is read, if it is large."""
    with suppress(OSError):  # whoever reads it says so
        if (size := path.stat().st_size) >= LONG_BYTES:
            log.info("reading %s (%.1f GB): %s", path, size / 1e9, why)


class Pauses:
    """Of one pass in an event loop."""

    def __init__(self) -> None:
        self._since_s = monotonic()

    async def rest(self) -> None:
        """Behind a line: where the pass went on for long, others have their turn, and signals. It may be cancelled here."""
        if monotonic() - self._since_s > LONGEST_S:
            await asyncio.sleep(0)
            self._since_s = monotonic()
