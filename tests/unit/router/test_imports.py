"""What a router process may not load."""

from __future__ import annotations

import subprocess
import sys


def test_router_loads_no_jax():
    code = (
        "import sys, jdisagg.router.fleet_engine, jdisagg.router.service, jdisagg.api.grpc_health\n"
        "print([name for name in ('jax', 'jaxlib', 'flax', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "[]"
