"""What a batch says on stderr. The disk behind that may be full, or nobody there to read it: the batch goes on all the same."""

from __future__ import annotations

import sys
from contextlib import suppress

from jdisagg.core.outlet import Outlet


def say(text: str) -> None:
    """One line."""
    with suppress(OSError):
        Outlet(sys.stderr).write(f"jdisagg.batch: {text}\n")
