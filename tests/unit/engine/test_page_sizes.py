"""Page sizes that a TPU's kernels cannot serve, or not with the bits of other workers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.aot.planned import planned_mesh
from jdisagg.core.config import CacheConfig, Config, ModelConfig, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import Role
from jdisagg.engine import page_sizes
from jdisagg.engine.build import make_runner
from jdisagg.engine.page_sizes import check_page_size
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.spec import KVSpec
from pallas_kernels.blocks import Blocks, BlockTable, blocks_by_rule
from tests.unit.engine.support import load

SPEC = KVSpec(num_layers=2, num_kv_heads=8, features=256, dtype="bfloat16", kind="full", window=None)
EIGHT_WIDE = replace(SPEC, num_kv_heads=32)  # blocks of 128 tokens


def check(
    page_size: int,
    pages_per_seq: int = 512,
    *,
    spec: KVSpec = SPEC,
    platform: str = "tpu",
    tp: int = 1,
    numerics: Numerics = Numerics.EXACT,
) -> None:
    mesh = planned_mesh(platform, tp)
    layout = choose_layout(spec, mesh, page_size)
    check_page_size(layout, mesh, num_heads=32, pages_per_seq=pages_per_seq, numerics=numerics)


@pytest.mark.parametrize("page_size", [8, 24, 48, 512, 1024])
def test_pages_that_do_not_make_up_the_block_of_keys_are_refused_in_exact(page_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--page-size: got {page_size}, wanted 16, 32, 64, 128 or 256 for --numerics exact"):
        check(page_size)
    check(page_size, numerics=Numerics.FAST)
    check(page_size, platform="cuda")
    check(page_size, platform="cpu")


@pytest.mark.parametrize(
    ("spec", "tp", "allowed"),
    [
        (SPEC, 1, (16, 32, 64, 128, 256)),
        (SPEC, 4, (16, 32, 64, 128, 256, 512, 1024)),
        (EIGHT_WIDE, 1, (16, 32, 64, 128)),
        (replace(SPEC, dtype="float32"), 1, (8, 16, 32, 64, 128)),
        (replace(SPEC, dtype="int8"), 1, (128, 256, 512)),
    ],
)
def test_pages_of_all_sizes_that_are_allowed_make_up_blocks_of_as_many_keys(
    spec: KVSpec, tp: int, allowed: tuple[int, ...]
) -> None:
    keys = set()
    for page_size in allowed:
        check(page_size, spec=spec, tp=tp)
        kv: Any = jax.ShapeDtypeStruct((2, 2, spec.num_kv_heads // tp, page_size, spec.features), jnp.dtype(spec.dtype))
        q: Any = jax.ShapeDtypeStruct((16, 32 // tp, spec.features // 2), jnp.bfloat16)
        keys.add(page_size * blocks_by_rule(kv=kv, q=q, decode=True, max_pages=8192).pages)
    assert len(keys) == 1
    with pytest.raises(ConfigError, match="--page-size") as refused:
        check(1152, spec=spec, tp=tp)
    named = refused.value.message.partition("wanted ")[2].partition(" for ")[0]
    assert tuple(map(int, re.findall(r"\d+", named))) == allowed


def test_a_size_that_was_measured_with_other_blocks_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = BlockTable({(True, 128, 8, 32, "bfloat16", 32): Blocks(1, 4)})
    monkeypatch.setattr(page_sizes, "tuned", lambda device_kind: measured)
    with pytest.raises(ConfigError, match=r"got 32, wanted 16, 64, 128 or 256 for"):
        check(32)


def test_a_model_that_plain_xla_serves_anyhow_takes_pages_of_all_sizes() -> None:
    check(48, spec=replace(SPEC, features=160))
    check(16, 2**20, spec=replace(SPEC, features=160))


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_page_table_that_is_too_long_names_the_size_and_the_length_that_would_do(numerics: Numerics) -> None:
    check(16, 2**16, numerics=numerics)
    with pytest.raises(ConfigError, match=r"got 16, .* 65537 pages, .* give 32, or lower --max-model-len to 1048576$"):
        check(16, 2**16 + 1, numerics=numerics)
    with pytest.raises(ConfigError, match=r"give 64, or lower --max-model-len"):
        check(16, 229_802, numerics=numerics)
    check(16, 2**16 + 1, platform="cuda", numerics=numerics)
    with pytest.raises(ConfigError, match=r"page tables of TPU kernels; lower --max-model-len to 67108864$"):
        check(1024, 2**16 + 1, numerics=Numerics.FAST)


def test_a_worker_asks_before_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sizes, "kernels_of", lambda device: "tpu")
    config = Config(model=ModelConfig(numerics=Numerics.EXACT, max_model_len=64), cache=CacheConfig(page_size=4, num_pages=64))
    with pytest.raises(ConfigError, match="--page-size: got 4, wanted 8, 16"):
        make_runner(*load(head_dim=64), config, Role.UNIFIED)
