"""The GPU kernels through the compiler of an H200 that is not here: `python -m tests.kernels.gpu_gate [--full | --bad]`.

One JSON line per kernel, like `compile_gate`'s. It wants jax-cuda13-plugin and jax-cuda13-pjrt of jax's version, ptxas and
libdevice, and no GPU. Without them `lower` still shows what XLA is given: Pallas' own lowering takes the kernel, and nothing
beside the kernel touches the cache.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from tests.kernels.compile_gate import KERNEL_CALLS, KERNELS, Case, compile_case

TOPOLOGY = "h200:1"
TARGET = Path(__file__).parents[2] / "jdisagg" / "aot" / "data" / "h200.txtpb"
_RESULT = re.compile(r"= \"?(?:stablehlo|func|chlo)\.(\w+)[^\n]* (?:-> |: )\(?tensor<([\dx]+)x(\w+)>")
_ITEM_BYTES = {"bf16": 2, "f32": 4, "i8": 1, "i32": 4, "i1": 1}


def cases(full: bool) -> Iterator[Case]:
    """What is compiled always, or all there is."""
    case = partial(Case, implementation="gpu")
    for dim in (64, 128):
        yield case(kernel="decode", dim=dim)
        yield case(kernel="prefill", dim=dim, queries=512)
    yield case(kernel="decode", dtype="int8")
    yield case(kernel="decode", kv_heads=1, group=8, rows=1, queries=1)
    yield case(kernel="mixed", window=1024, queries=512)
    for kernel in ("write", "gather", "scatter"):
        yield case(kernel=kernel, queries=256)
    if full:
        shapes: tuple[dict[str, Any], ...] = (
            {"kv_heads": 1, "group": 8},
            {"kv_heads": 16, "group": 1},
            {"kv_heads": 4, "group": 7},
            {"window": 1024},
            {"dtype": "float32"},
            {"dtype": "int8", "kv_heads": 1, "group": 8},
        )
        for dim in (64, 128):
            for shape in shapes:
                yield case(kernel="decode", dim=dim, **shape)
                yield case(kernel="prefill", dim=dim, queries=512, **shape)
            yield case(kernel="decode", dim=dim, rows=128, queries=128)
            yield case(kernel="prefill", dim=dim, queries=4096, rows=64)
        for shape in ({"dtype": "float32"}, {"kv_heads": 1}, {"dtype": "int8"}):
            for kernel in ("write", "gather", "scatter"):
                yield case(kernel=kernel, queries=512, **shape)


def bad_cases() -> Iterator[Case]:
    """What must not pass: a cache that is turned around for the kernel."""
    yield Case(kernel="copying", implementation="gpu")


def lower(case: Case) -> str:
    """StableHLO for CUDA. jax 0.11 must be told the device, and may want Triton's compiler: RuntimeError without it."""
    step, arguments = KERNELS[case.kernel](case, jax.ShapeDtypeStruct)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)):
        return jax.jit(step, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def large_results(text: str, least_bytes: int) -> list[str]:
    """Names of StableHLO operations that make `least_bytes` or more, views left out."""
    found = []
    for name, dims, kind in _RESULT.findall(text):
        size = int(np.prod([int(dim) for dim in dims.split("x")])) * _ITEM_BYTES.get(kind, 4)
        if size >= least_bytes and name != "reshape":
            found.append(name)
    return found


def kernel_calls(text: str) -> int:
    """Calls of kernels in StableHLO."""
    return sum(text.count(f"@{target}(") for target in KERNEL_CALLS)


def cache_bytes(case: Case) -> int:
    """Bytes of keys and values."""
    return int(np.prod(case.shape)) * jnp.dtype(case.dtype).itemsize


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--bad", action="store_true", help="compile what must not pass")
    options = parser.parse_args()
    device = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1").devices[0]
    for chosen in bad_cases() if options.bad else cases(options.full):
        print(json.dumps(asdict(compile_case(chosen, TOPOLOGY, device))), flush=True)
