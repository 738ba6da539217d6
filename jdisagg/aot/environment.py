"""What the process must settle before jax is imported. No jax here."""

from __future__ import annotations

from collections.abc import MutableMapping

from jdisagg.serve.environment import DEVICE_COUNT_FLAG

# libtpu would ask a metadata server and the host what TPU it is on; there is none, and any answer will do.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def prepare_compilers(environ: MutableMapping[str, str], *, num_cpu_devices: int = 1) -> None:
    """Keep jax on the CPU, whatever this machine has: nothing is to run. Compilation times are not read from a cache."""
    environ["JAX_PLATFORMS"] = "cpu"
    environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name, value in _LIBTPU.items():
        environ.setdefault(name, value)
    if num_cpu_devices > 1 and DEVICE_COUNT_FLAG not in environ.get("XLA_FLAGS", ""):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}={num_cpu_devices}".strip()
