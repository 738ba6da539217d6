"""A process that ends when the one that started it does, however that dies: nothing is left on the accelerator.

By a signal of the kernel (Linux). Workers of the engine have their own way, see `jdisagg.serve.environment`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT_VARIABLE = "GPU_CHECK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def with_our_pid(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that calls `end_with_parent`. Start it from a thread that lives as long as it shall."""
    return {**environ, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """From now on; by hand, without such an environment, nothing happens."""
    if (parent := os.environ.get(PARENT_VARIABLE)) is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
