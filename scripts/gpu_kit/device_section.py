"""Section `device`: what jax sees, that a product is right, and the two rates everything else is compared with."""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from bench_kit.figures import spread
from bench_kit.roofline import copy_bytes_per_s, matmul_flop_per_s

from gpu_kit.findings import Findings, Skipped
from gpu_kit.setting import Setting

SIZE = 512


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    findings.fact(
        platform=first.platform,
        kind=first.device_kind,
        count=len(jax.devices()),
        memory_limit_bytes=stats.get("bytes_limit"),
        bytes_in_use=stats.get("bytes_in_use"),
        jax_client=str(getattr(first.client, "platform_version", "")).splitlines()[-1:],
    )
    if first.platform == "cpu" and not setting.small:
        raise Skipped("no accelerator: large sizes are not for a CPU")
    ones = jnp.ones((SIZE, SIZE), jnp.bfloat16)
    product = jnp.dot(ones, ones, preferred_element_type=jnp.float32)
    findings.check("a product of ones is right", bool((product == SIZE).all()))
    scale = setting.scale
    copied = copy_bytes_per_s(scale.copy_bytes, repeats=scale.repeats)
    findings.fact(copy_gb_per_s=round(statistics.median(copied) / 1e9, 2), copy_gb_per_s_spread=spread(copied, ".4g", 1e-9))
    multiplied = matmul_flop_per_s(scale.matmul_size, repeats=scale.repeats)
    findings.fact(
        bf16_tflop_per_s=round(statistics.median(multiplied) / 1e12, 4),
        bf16_tflop_per_s_spread=spread(multiplied, ".4g", 1e-12),
    )
