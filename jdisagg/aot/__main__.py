"""`python -m jdisagg.aot --model DIR|CONFIG --topology v6e:2x4 --tp 8`: does it fit, does it compile, how fast can it be?

Exit status: 0 yes (or every gate holds), 1 no, 2 a command that cannot be answered, be it only now.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from jdisagg.aot.command import parse_command
from jdisagg.aot.environment import prepare_compilers
from jdisagg.core.errors import ConfigError

EXIT_BAD_COMMAND = 2
_MODULE = "jdisagg.aot.run"  # imports jax: resolved once the environment is ready


def main(argv: Sequence[str]) -> int:
    """Answer one command; returns the exit status."""
    try:
        command = parse_command(argv)
        topology = command.topology
        num_devices = topology.num_devices if topology is not None and topology.accelerator.platform == "cpu" else 1
        prepare_compilers(os.environ, num_cpu_devices=num_devices)
        return importlib.import_module(_MODULE).run(command)
    except ConfigError as error:
        print(f"jdisagg.aot: {error.message}", file=sys.stderr)
        return EXIT_BAD_COMMAND  # also for an error whose `exit_status` is 1, which is "no" here


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
