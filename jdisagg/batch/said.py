"""What a batch says on stderr. The disk behind that may be full, or nobody there to read it: the batch goes on all the same."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from jdisagg.core.outlet import Outlet


def say(text: str, out: TextIO | None = None) -> None:
    """One line, on stderr where `out` is not given."""
    with suppress(OSError):
        Outlet(out or sys.stderr).write(f"jdisagg.batch: {text}\n")
