"""The process of one section: `python -m gpu_kit.child NAME --module M --out DIR --scratch DIR --limit-s S [--small]`.

What it finds goes to DIR/sections/NAME.json. Exit status 0, 1 when the section raised, 5 when it cannot run here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from gpu_kit.ending import end_with_parent
from gpu_kit.findings import Clock, Findings, Skipped
from gpu_kit.setting import Setting
from jdisagg.core.config import Config
from jdisagg.serve.environment import prepare_jax

MEMORY_SHARE = "0.92"  # of the device, that a process may grow to; without it three quarters
EXIT_RAISED, EXIT_SKIPPED = 1, 5


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--module", required=True, help="has run(setting, findings)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    end_with_parent()
    prepare_jax(Config(role="unified"), os.environ)  # as a worker has it: no preallocation, compiled programs are kept
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):  # jax refuses to start when both are set
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    findings = Findings(options.out / "sections" / f"{options.name}.json")
    setting = Setting(
        name=options.name, out=options.out, scratch=options.scratch, small=options.small, clock=Clock(options.limit_s)
    )
    module = importlib.import_module(options.module)  # after the environment is ready
    try:
        module.run(setting, findings)
    except Skipped as reason:
        findings.left_out(options.name, str(reason))
        return EXIT_SKIPPED
    return 0


def _end(status: int) -> NoReturn:
    """Without waiting for threads: one that still compiles, or hangs in a pull, is of no use any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        _end(main())
    except Exception:  # noqa: BLE001  # printed; then nobody waits for its threads
        traceback.print_exc()
        _end(EXIT_RAISED)
