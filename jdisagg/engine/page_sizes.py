"""Page sizes that the TPU kernels cannot serve, found before anything is compiled: page tables that are too long, and blocks of
keys that `exact` would sum in another order than with other pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jdisagg.core.config import Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.engine.ops import kernels_of, tpu_layout_refuses
from jdisagg.kv.layout import KVLayout
from jdisagg.kv.pool import MIN_PAGES
from pallas_kernels.attention import MOST_PAGES
from pallas_kernels.blocks import blocks_by_rule, keys_by_rule, tuned

_SIZES = tuple(2**power for power in range(11))  # that are tried; a flag takes up to 1024


def check_page_size(layout: KVLayout, mesh: Mesh, *, num_heads: int, pages_per_seq: int, numerics: Numerics) -> None:
    """Raise ConfigError naming --page-size for pages that the kernels of a TPU cannot serve; other devices take all.
    `num_heads`: query heads of the whole model."""
    device = mesh.devices.flat[0]
    if kernels_of(device) != "tpu":
        return
    if numerics is Numerics.EXACT:
        _check_exact(layout, device, num_heads)
    if tpu_layout_refuses(layout) is None and pages_per_seq > MOST_PAGES:
        raise ConfigError(_too_long(layout.page_size, pages_per_seq))


def _too_long(page_size: int, pages_per_seq: int) -> str:
    longest = MOST_PAGES * page_size
    larger = next((size for size in _SIZES if size > page_size and -(-pages_per_seq * page_size // size) <= MOST_PAGES), None)
    advice = "" if larger is None else f"give {larger}, or "
    return (
        f"--page-size: got {page_size}, with which the longest request has {pages_per_seq} pages, wanted at most {MOST_PAGES} "
        f"in the page tables of TPU kernels; {advice}lower --max-model-len to {longest}"
    )


def _check_exact(layout: KVLayout, device: Any, num_heads: int) -> None:
    """Every worker of a fleet sums keys in blocks of as many tokens, or its bits are its own: pages of some sizes do not make
    up such a block, and others are served by plain XLA while the rest have a kernel."""
    served = [size for size in _SIZES if tpu_layout_refuses(replace(layout, page_size=size)) is None]
    allowed = [size for size in served if _divides(replace(layout, page_size=size), device, num_heads)]
    if allowed and layout.page_size not in allowed:
        *others, last = map(str, allowed)
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(
            f"--page-size: got {layout.page_size}, wanted {wanted} for --numerics exact on TPU: pages of other sizes do not "
            "make up the kernel's blocks of keys, and streams would differ from those of other workers"
        )


def _divides(layout: KVLayout, device: Any, num_heads: int) -> bool:
    """True where blocks of keys are as long as by the rule, in which pages have no say."""
    data = layout.abstract(MIN_PAGES).data
    num_layers, num_pages, heads, *page = data.shape
    kv: Any = jax.ShapeDtypeStruct((num_layers, num_pages, heads // layout.num_shards, *page), data.dtype)
    q: Any = jax.ShapeDtypeStruct((1, num_heads // layout.num_shards, layout.spec.features // 2), data.dtype)
    table = tuned(device.device_kind)
    rule = blocks_by_rule if table is None else table.blocks
    keys = keys_by_rule(kv)
    return rule(kv=kv, q=q, decode=True, max_pages=keys).pages * layout.page_size == keys
