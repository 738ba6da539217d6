"""`python -m jdisagg.serve --role ROLE [--config FILE.toml] [flags]`: load settings, prepare the process, run the role.

Roles live in modules resolved by name, after the environment is prepared, so that `--help`, a bad flag, the router and the
supervisor never pay for (or start) jax.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from jdisagg.api.http.version import package_version
from jdisagg.core.errors import ConfigError
from jdisagg.core.logs import setup_logs
from jdisagg.core.printed import to_toml
from jdisagg.core.settings import load_config
from jdisagg.serve.environment import (
    allow_descriptors,
    die_with_parent,
    keep_freed_memory,
    open_standard_streams,
    pin_to_cores,
    prepare_jax,
    quiet_grpc,
)
from jdisagg.serve.preflight import check_worker
from jdisagg.serve.process import end_when_told, run_process, search_seldom
from jdisagg.serve.tpu import claim_chips, find_tpu

log = logging.getLogger("jdisagg.serve")  # what was started: this module is called __main__

EXIT_BAD_CONFIG = 2
_MODULES = {"router": "jdisagg.serve.router", "local": "jdisagg.serve.local"}
_WORKER_MODULE = "jdisagg.serve.worker"  # every other role


def main(argv: Sequence[str]) -> int:
    """Run one process until it is told to stop; returns its exit status (2 for a bad configuration)."""
    open_standard_streams()
    end_when_told()
    search_seldom()
    if list(argv) == ["--version"]:
        sys.stdout.write(f"jdisagg {package_version()}\n")
        return 0
    try:
        setup_logs("serve")  # load_config remarks on settings that say nothing to the role
    except ConfigError as error:  # the settings of the log itself
        sys.stderr.write(f"{log.name}: {error.message}\n")
        return EXIT_BAD_CONFIG
    try:
        return _run(argv)
    except ConfigError as error:
        log.critical("%s", error.message)
        return error.exit_status


def _run(argv: Sequence[str]) -> int:
    """Raises ConfigError."""
    config = load_config(argv)
    if config.server.print_config:
        sys.stdout.write(to_toml(config))
        return 0
    setup_logs(config.role)
    die_with_parent(os.environ)
    allow_descriptors()
    quiet_grpc(os.environ)
    pin_to_cores(config.device)
    if config.role not in _MODULES:
        check_worker(config)
        config = claim_chips(config, os.environ, find_tpu(os.environ))
        keep_freed_memory(os.environ)
        prepare_jax(config, os.environ)
    module = importlib.import_module(_MODULES.get(config.role, _WORKER_MODULE))
    return run_process(lambda process: module.serve(config, process))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
