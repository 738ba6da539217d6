"""What XLA is told about the steps, which its own choices do not serve; by platform."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jdisagg.core.platforms import GPU_PLATFORMS

# Products of one input are joined where weights are small, by default 32 MB. For a few rows gate and up of an 8B model are
# read faster joined, by one kernel instead of two. For a prompt's rows cuBLAS would want the weights copied.
_DECODE: Mapping[str, int | bool] = MappingProxyType({"xla_gpu_dot_merger_threshold_mb": 1024})

# By default XLA tries kernels out and takes what was fastest this time, so that two workers may compute unlike bits (seen on an
# H200: two cold compilations of one layer). Untried, cuBLAS chooses by shapes and device alone.
_EXACT: Mapping[str, int | bool] = MappingProxyType(
    {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,  # cuBLAS would want the weights copied
    }
)


def step_options(step: str, platform: str) -> dict[str, int | bool] | None:
    """`compiler_options` of jax.jit for "prefill", "decode" or "exact"; None: XLA's own."""
    if platform not in GPU_PLATFORMS:
        return None
    return dict({"decode": _DECODE, "exact": _EXACT}.get(step, {})) or None
