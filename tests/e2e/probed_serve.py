"""`python -m tests.e2e.probed_serve FLAGS`: `jdisagg.serve` whose worker is `probed_worker`. Does not import jax."""

from __future__ import annotations

import sys

from jdisagg.serve import __main__ as serve

PROBE_DIR = "JDISAGG_PROBE_DIR"

if __name__ == "__main__":
    serve._WORKER_MODULE = "tests.e2e.probed_worker"
    sys.exit(serve.main(sys.argv[1:]))
