"""Sampling defaults are those that a model's generation_config.json recommends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jdisagg.serve.text_edge import sampling_defaults


@pytest.mark.parametrize(("top_k", "wanted"), [(20, 20), (20.0, 20), (0, None), (-1, None)])
def test_a_top_k_that_is_off_is_none(tmp_path: Path, top_k: float, wanted: int | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": top_k, "temperature": 0.6}))
    defaults = sampling_defaults(tmp_path)
    assert (defaults.top_k, defaults.temperature) == (wanted, 0.6)
