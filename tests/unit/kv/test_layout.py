"""What a platform's compiler makes of a layout."""

from __future__ import annotations

import pytest

from jdisagg.aot.planned import planned_mesh
from jdisagg.core.errors import ConfigError
from jdisagg.kv.layout import choose_layout
from jdisagg.kv.spec import KVSpec


def spec(head_dim: int, dtype: str = "bfloat16") -> KVSpec:
    return KVSpec(num_layers=2, num_kv_heads=2, features=2 * head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("platform", "head_dim", "turned"), [("tpu", 32, True), ("tpu", 100, True), ("tpu", 64, False), ("tpu", 128, False)]
)
def test_rows_that_do_not_fill_registers_are_turned_around_on_tpu(platform: str, head_dim: int, turned: bool) -> None:
    assert choose_layout(spec(head_dim), planned_mesh(platform, 1), 16).is_turned == turned


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_other_platform_turns_them(platform: str) -> None:
    assert not choose_layout(spec(32), planned_mesh(platform, 1), 16).is_turned


def test_int8_on_tpu_wants_pages_whose_scales_fill_registers() -> None:
    with pytest.raises(ConfigError, match=r"--page-size: got 16, wanted a multiple of 128 for int8 on TPU"):
        choose_layout(spec(128, "int8"), planned_mesh("tpu", 1), 16)
    assert not choose_layout(spec(128, "int8"), planned_mesh("tpu", 1), 256).is_turned
    assert not choose_layout(spec(128, "int8"), planned_mesh("cpu", 1), 16).is_turned
