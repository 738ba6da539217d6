"""Section `moving`: KV of Llama 3 8B out of pages and back, and KV from process to process over every backend, in GB/s."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from bench_kit.figures import spread
from bench_kit.roofline import copy_bytes_per_s, seconds_each
from transfer_bench.bare import RawTcp
from transfer_bench.consumer import Moved, connected
from transfer_bench.parts import TOKEN_BYTES, Form

from gpu_kit.findings import Findings
from gpu_kit.setting import Setting
from gpu_kit.targets import HANDOFF, OF_TCP
from jdisagg.handoff.credit import WINDOW_PIECES
from jdisagg.kv.layout import KVLayout, choose_layout
from jdisagg.kv.spec import KVSpec
from jdisagg.models.sharding import make_mesh
from jdisagg.serve.environment import keep_freed_memory

BACKENDS = ("jax", "grpc", "shm")  # the one with a target first: time may run out
WAIT_SHARE = 0.5  # of the time there is, for one answer: of a backend that hangs, the others are still seen
PAGE_SIZE = 16
WARM_PIECES = 4
PLAIN = "plain TCP"
WIDE = 8  # pieces: whether waiting for acknowledgements costs anything
LEAST_S = 15.0  # a backend with less time left is not begun: half of it is for a process that starts


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    keep_freed_memory(os.environ)  # as a worker does; the plain socket's receiver has it as well
    rates: dict[str, float] = {}
    findings.attempt("a plain TCP socket", partial(_plain, setting, rates, findings))
    for backend in BACKENDS:
        attempt = findings.attempt if backend == "jax" else partial(_attempt, setting, findings)
        attempt(f"hand-off over {backend}", partial(_between, backend, setting, rates, findings))
        if backend == "jax":
            why = "the backend failed" if backend not in rates else "no accelerator"
            findings.target(HANDOFF, None if setting.small else rates.get(backend), why)
            known = PLAIN in rates and backend in rates and not setting.small
            findings.target(OF_TCP, rates[backend] / rates[PLAIN] if known else None, why if PLAIN in rates else "no plain TCP")
    _attempt(setting, findings, "gather and scatter", partial(_on_device, setting, findings))
    for name, changed in {"a wider window": {"window": WIDE}, "no checksums": {"checksums": False}}.items():
        _attempt(setting, findings, f"hand-off over jax, {name}", partial(_between, "jax", setting, rates, findings, **changed))


def _attempt(setting: Setting, findings: Findings, part: str, run: Callable[[], None]) -> None:
    """Unless there is too little time for it."""
    if setting.clock.left_s() < (0.0 if setting.small else LEAST_S):
        findings.left_out(part, "out of time")
    else:
        findings.attempt(part, run)


def _on_device(setting: Setting, findings: Findings) -> None:
    scale, mesh = setting.scale, make_mesh(jax.devices()[:1], 1)
    layers, heads, dtype = (2, 2, "float32") if setting.small else (32, 8, "bfloat16")
    spec = KVSpec(num_layers=layers, num_kv_heads=heads, features=256, dtype=dtype)
    layout: KVLayout = choose_layout(spec, mesh, PAGE_SIZE)
    num_tokens, num_pages = scale.gathered_tokens, 4 * scale.gathered_tokens // PAGE_SIZE
    token = np.arange(num_tokens)
    order = 1 + np.random.default_rng(8).permutation(num_pages - 1)[: num_tokens // PAGE_SIZE]
    pages, offsets = jnp.asarray(order[token // PAGE_SIZE], jnp.int32), jnp.asarray(token % PAGE_SIZE, jnp.int32)
    kv = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.abstract(num_pages))
    gather = jax.jit(lambda kv: layout.gather_tokens(mesh, kv, pages, offsets))
    scatter = jax.jit(lambda kv, rows: layout.scatter_tokens(mesh, kv, rows, pages, offsets), donate_argnums=0)
    rows = gather(kv)
    held = [kv]

    def store() -> object:
        held.append(scatter(held.pop(), rows))
        return held[0]

    copied = statistics.median(copy_bytes_per_s(scale.copy_bytes, repeats=scale.repeats))
    num_bytes = 2 * num_tokens * layout.spec.bytes_per_token  # read and written
    for name, act in (("gather", lambda: gather(held[0])), ("scatter", store)):
        rate = [num_bytes / seconds for seconds in seconds_each(act, repeats=scale.repeats)]
        share = statistics.median(rate) / copied
        findings.row(
            "out of pages and back", what=name, tokens=num_tokens, gb_per_s=spread(rate, ".4g", 1e-9), share_of_copy=share
        )


def _plain(setting: Setting, rates: dict[str, float], findings: Findings) -> None:
    """The yardstick: as many bytes over one socket into fresh buffers, from another process."""
    scale = setting.scale
    socket = RawTcp(scale.piece_bytes)
    try:
        socket.move(WARM_PIECES)
        _tell(
            PLAIN, [socket.move(scale.moved_bytes // scale.piece_bytes) for _ in range(scale.repeats)], setting, rates, findings
        )
    finally:
        socket.close()


def _between(
    backend: str,
    setting: Setting,
    rates: dict[str, float],
    findings: Findings,
    *,
    window: int = WINDOW_PIECES,
    checksums: bool = True,
) -> None:
    """From Open to the last piece confirmed on D's device, over a real hand-off stream."""
    scale = setting.scale
    count = scale.moved_bytes // scale.piece_bytes
    form = Form(backend=backend, tokens=scale.piece_bytes // TOKEN_BYTES, checksums=checksums, window=window)
    with connected(form, wait_s=WAIT_SHARE * setting.clock.left_s()) as consumer:
        consumer.move(WARM_PIECES)
        moved = [consumer.move(count) for _ in range(scale.repeats)]
        first_ms = sorted(1e3 * consumer.first_chunk_s() for _ in range(10 * scale.repeats))
    wide = "" if window == WINDOW_PIECES else f", window of {window} pieces"
    name = f"{backend}{wide}{'' if checksums else ', no checksums'}"
    _tell(name, moved, setting, rates, findings, open_to_announcement_ms=first_ms[len(first_ms) // 2])


def _tell(
    backend: str, moved: list[Moved], setting: Setting, rates: dict[str, float], findings: Findings, **cells: float
) -> None:
    """One row."""
    scale, rate = setting.scale, [one.num_bytes / one.seconds for one in moved]
    cpu = statistics.median((one.cpu_p_s + one.cpu_d_s) / one.num_bytes for one in moved)
    rates[backend] = statistics.median(rate) / 1e9
    findings.row(
        "between two processes",
        backend=backend,
        mib=scale.moved_bytes // 2**20,
        piece_mib=scale.piece_bytes // 2**20,
        gb_per_s=spread(rate, ".4g", 1e-9),
        cpu_s_per_gb=1e9 * cpu,
        **cells,
    )
