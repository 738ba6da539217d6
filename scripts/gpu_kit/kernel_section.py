"""Section `kernels`: every implementation that pallas_kernels offers here against NumPy float64, unused cells full of NaN;
and the noise of sampling, which is the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_kit import offers
from gpu_kit.attention_case import CASES, PAGE_SIZE, TOLERANCE, Case
from gpu_kit.findings import Findings
from gpu_kit.noise_case import ALLOWED, DRAWS, VOCAB_SIZE, answer
from gpu_kit.paged_rows import LAYER, NUM_LAYERS
from gpu_kit.setting import Setting
from jdisagg.engine.noise import gumbel
from jdisagg.kv.group import KVGroup
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from pallas_kernels.implementation import Implementation
from pallas_kernels.transfer import gather, scatter

HEADS, FEATURES, PAGES, TOKENS = 4, 256, 12, 40


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    platform = jax.devices()[0].platform
    layout = _layout("float32")
    names = offers.implementations(platform)
    findings.fact(implementations=", ".join(names), axis_order="heads-major" if layout.heads_major else "tokens-major")
    answered: set[str] = set()
    parts: dict[str, Callable[[], None]] = {"noise of sampling": partial(_noise, findings)}
    for name in sorted(names, key="ref".__eq__):  # the plain one last: it is known, and compiles for as long
        for case in CASES[:: 3 if setting.small else 1]:
            parts[f"{name}, {case.name}"] = partial(_attend, name, case, layout.heads_major, findings, answered)
        parts[f"{name}, KV write"] = partial(_write, name, layout.heads_major, findings)
        parts[f"{name}, page gather and scatter"] = partial(_pages, name, layout.heads_major, findings)
    for dtype in ("float32", "bfloat16", "int8"):
        parts[f"gather and scatter of tokens, {dtype}"] = partial(_tokens, dtype, findings)
    for part, run_part in parts.items():
        if setting.clock.left_s():
            findings.attempt(part, run_part)
        else:
            findings.left_out(part, "out of time")
    if setting.clock.left_s():
        for name in names:
            findings.check(f"{name} takes some case of attention", name in answered)


def _attend(name: Implementation, case: Case, heads_major: bool, findings: Findings, answered: set[str]) -> None:
    """Adds `name` to `answered` where it does not refuse."""
    paged, asked = case.arrays(heads_major=heads_major), {"scale": case.head_dim**-0.5, "window": case.window}
    got = np.asarray(offers.attend(name, paged, **asked), np.float64)
    answered.add(name)
    worst = float(np.abs(got - paged.wanted(**asked)).max())
    allowed = TOLERANCE[case.kv_dtype]
    findings.row("attention", implementation=name, case=case.name, worst=worst, allowed=allowed)
    findings.check(f"{name}, {case.name}", worst <= allowed, f"worst difference {worst:.2g}, allowed {allowed:g}")


def _write(name: Implementation, heads_major: bool, findings: Findings) -> None:
    rng = np.random.default_rng(5)
    cells = rng.permutation((PAGES - 1) * PAGE_SIZE)[:TOKENS]
    pages, offsets = (1 + cells // PAGE_SIZE).astype(np.int32), (cells % PAGE_SIZE).astype(np.int32)
    rows = rng.normal(size=(TOKENS, HEADS, FEATURES)).astype(np.float32)
    pool = np.full((NUM_LAYERS, PAGES, PAGE_SIZE, HEADS, FEATURES), np.nan, np.float32)
    kv = offers.on_device(pool, heads_major=heads_major)
    got = offers.write(name, kv, *map(jnp.asarray, (rows, pages, offsets)), heads_major=heads_major)
    wanted = pool.copy()
    wanted[LAYER, pages, offsets] = rows
    _same(f"{name}, KV write", got.swapaxes(2, 3) if heads_major else got, wanted, findings)


def _pages(name: Implementation, heads_major: bool, findings: Findings) -> None:
    rng = np.random.default_rng(6)
    pool = rng.normal(size=(NUM_LAYERS, PAGES, PAGE_SIZE, HEADS, FEATURES)).astype(np.float32)
    pages = (1 + rng.permutation(PAGES - 1)[:4]).astype(np.int32)
    options: dict[str, Any] = {"heads_major": heads_major, "implementation": name}
    kv = offers.on_device(pool, heads_major=heads_major)
    rows = offers.unless_refused(jax.jit(lambda kv: gather(kv, jnp.asarray(pages), **options)), kv)
    put = jax.jit(lambda kv, rows: scatter(kv, rows, jnp.asarray(pages), 3, 40, **options))
    back = offers.unless_refused(put, jnp.full_like(kv, jnp.nan), rows)
    wanted = pool[:, pages].reshape(NUM_LAYERS, -1, HEADS, FEATURES)
    _same(f"{name}, page gather", rows, wanted, findings)
    cells = np.full(pool.shape, np.nan, np.float32)
    for token in range(3, 40):
        cells[:, pages[token // PAGE_SIZE], token % PAGE_SIZE] = wanted[:, token]
    _same(f"{name}, page scatter", back.swapaxes(2, 3) if heads_major else back, cells, findings)


def _tokens(dtype: str, findings: Findings) -> None:
    """What exports and imports of the engine are: there and back through a second pool."""
    mesh, layout, rng = make_mesh(jax.devices()[:1], 1), _layout(dtype), np.random.default_rng(7)
    shapes = layout.abstract_rows(TOKENS)
    rows = jax.tree.map(lambda x: jnp.asarray(rng.integers(-100, 100, x.shape), x.dtype), shapes)
    where = rng.permutation((PAGES - 1) * PAGE_SIZE)[:TOKENS]
    pages, offsets = (jnp.asarray(cells, jnp.int32) for cells in (1 + where // PAGE_SIZE, where % PAGE_SIZE))
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.abstract(PAGES))
    scatter = jax.jit(lambda kv, rows: layout.scatter_tokens(mesh, kv, rows, pages, offsets), donate_argnums=0)
    gather = jax.jit(lambda kv: layout.gather_tokens(mesh, kv, pages, offsets))
    back: KVGroup = gather(scatter(empty, rows))
    for got, wanted in zip(back.arrays, rows.arrays, strict=True):
        _same(f"gather and scatter of tokens, {wanted.dtype}", got, wanted, findings)


def _noise(findings: Findings) -> None:
    drawn = jax.jit(gumbel, static_argnums=3)(*map(jnp.asarray, _columns()), VOCAB_SIZE)
    wanted = np.stack([answer(*draw, VOCAB_SIZE) for draw in DRAWS])
    worst = float(np.abs(np.asarray(drawn, np.float64) - wanted).max())
    findings.check("noise of sampling", worst <= ALLOWED, f"worst difference {worst:.2g}, allowed {ALLOWED:g}")


def _columns() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seeds, choices, positions = zip(*DRAWS, strict=True)
    return np.array(seeds, np.uint32), np.array(choices, np.int32), np.array(positions, np.int32)


def _layout(dtype: str) -> KVLayout:
    spec = KVSpec(num_layers=NUM_LAYERS, num_kv_heads=HEADS, features=FEATURES, dtype=dtype)
    return choose_layout(spec, make_mesh(jax.devices()[:1], 1), PAGE_SIZE)


def _same(name: str, got: jax.Array, wanted: jax.Array | np.ndarray, findings: Findings) -> None:
    """Bit for bit, NaN included."""
    left, right = np.asarray(got), np.asarray(wanted)
    findings.check(name, left.dtype == right.dtype and left.tobytes() == right.tobytes())
