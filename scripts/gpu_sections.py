"""The sections of gpu_check, each run as `gpu_sections.py NAME OUT_DIR`; the last line printed is JSON with "ok"."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fleet_process import FleetProcess, stream

from jdisagg.v1 import common_pb2, generation_pb2
from pallas_kernels import ref

READY_TIMEOUT_S = 180.0
PROMPT = "import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n" * 4
NUM_TOKENS = 64
SERVE = ("--model", "demo", "--dtype", "float32", "--kv-cache-bytes", "256MiB", "--numerics", "exact", "--devices", "0")


def device(out: Path) -> dict[str, Any]:
    """What jax sees, and one product on it."""
    first = jax.devices()[0]
    x = jnp.ones((4096, 4096), jnp.bfloat16)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    product(x).block_until_ready()
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - began_s)
    tflops = 2 * 4096**3 / sorted(times)[2] / 1e12
    return {
        "ok": bool(product(x)[0, 0] == 4096),
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(jax.devices()),
        "bf16_tflop_per_s": round(tflops, 1),
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
    }


def kernels(out: Path) -> dict[str, Any]:
    """Write and attention on the default device against the CPU, float32, ragged lengths, unused pages full of NaN."""
    layers, pages, size, heads, kv_heads, dim, rows, width = 2, 64, 16, 8, 4, 64, 6, 8
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, size * width, rows)
    tables = rng.permutation(np.arange(1, pages))[: rows * width].reshape(rows, width).astype(np.int32)
    q = rng.normal(size=(rows, heads, dim)).astype(np.float32)
    fresh = rng.normal(size=(2, rows, kv_heads, dim)).astype(np.float32)
    pool = np.full((layers, pages, size, kv_heads, 2 * dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for position in range(length):
            pool[:, tables[row, position // size], position % size] = rng.normal(size=(layers, kv_heads, 2 * dim))
    last = (lengths - 1).astype(np.int32)
    at = (tables[np.arange(rows), last // size], last % size)

    def step(kv: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, tables, positions = inputs
        options = {"heads_major": False, "dtype": jnp.dtype(jnp.float32)}
        kv = ref.write(kv, 1, k, v, at[0], at[1], **options)
        return ref.attend(q, kv, 1, tables, positions, scale=dim**-0.5, window=None, **options)

    found = {}
    for name, where in (("device", jax.devices()[0]), ("cpu", jax.devices("cpu")[0])):
        with jax.default_device(where), jax.default_matmul_precision("highest"):
            inputs = jax.device_put((q, fresh[0], fresh[1], tables, last), where)
            found[name] = np.asarray(jax.jit(step)(jax.device_put(pool, where), inputs))
    worst = float(np.max(np.abs(found["device"] - found["cpu"])))
    return {"ok": bool(np.isfinite(found["device"]).all() and worst < 1e-4), "max_abs_difference": worst}


def unified(out: Path) -> dict[str, Any]:
    """One engine: greedy tokens, kept for `pair` to compare with."""
    fleet = FleetProcess("--role", "unified", *SERVE, log=out / "unified.log")
    try:
        ready = fleet.wait_ready(READY_TIMEOUT_S)
        tokens, seconds, _ = ask(ready.grpc)
    finally:
        status = fleet.stop()
    (out / "unified_tokens.json").write_text(json.dumps(tokens))
    ok = len(tokens) == NUM_TOKENS and status == 0
    return {
        "ok": ok,
        "warmup_s": ready.warmup_s,
        "executables": ready.executables,
        "request_s": round(seconds, 3),
        "exit": status,
    }


def pair(out: Path) -> dict[str, Any]:
    """Router, P and D as processes on one device, KV over grpc, no local prefill: bytes cross, tokens equal unified's."""
    flags = ("--role", "local", *SERVE, "--kv-transfer-backend", "grpc", "--local-prefill", "never")
    fleet = FleetProcess(*flags, log=out / "pair.log")
    try:
        ready = fleet.wait_ready(READY_TIMEOUT_S)
        tokens, seconds, provenance = ask(ready.grpc)
    finally:
        status = fleet.stop()
    before = out / "unified_tokens.json"
    equal = json.loads(before.read_text()) == tokens if before.exists() else None
    return {
        "ok": provenance.transferred_bytes > 0 and equal is True and status == 0,
        "tokens_equal_unified": equal,
        "transferred_bytes": provenance.transferred_bytes,
        "transferred_tokens": provenance.transferred_tokens,
        "warmup_s": ready.warmup_s,
        "request_s": round(seconds, 3),
        "exit": status,
    }


def ask(address: str | None) -> tuple[list[int], float, common_pb2.Provenance]:
    """Tokens, seconds and provenance of one greedy request."""
    assert address is not None
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    began_s = time.monotonic()
    complete = stream(address, generation_pb2.GenerateRequest(text=PROMPT, sampling=sampling), 60.0)
    return list(complete.choices[0].token_ids), time.monotonic() - began_s, complete.choices[0].provenance


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {"device": device, "kernels": kernels, "unified": unified, "pair": pair}

if __name__ == "__main__":
    print(json.dumps(SECTIONS[sys.argv[1]](Path(sys.argv[2]))))
