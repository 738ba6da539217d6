"""`python -m tests.e2e.broken_serve FLAGS`: `jdisagg.serve` in which one backend cannot do its work. Does not import jax."""

from __future__ import annotations

import sys

from jdisagg.serve import __main__ as serve

if __name__ == "__main__":
    serve._WORKER_MODULE = "tests.e2e.broken_worker"
    sys.exit(serve.main(sys.argv[1:]))
