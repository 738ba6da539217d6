"""What sampled noise is judged by, and that a device which draws other numbers is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_kit import kernel_section
from gpu_kit.findings import Findings
from gpu_kit.noise_case import answer

from jdisagg.engine.noise import gumbel
from tests.unit.engine.test_sampler import KNOWN


def test_the_answer_is_the_one_that_the_sampler_is_pinned_to() -> None:
    assert np.abs(answer(7, 0, 3, 4) - KNOWN).max() < 1e-6


@pytest.mark.parametrize(
    ("error", "holds"), [(jnp.zeros_like, True), (lambda noise: jnp.where(noise > 9, 1e-4, 0.0), False), (jnp.sin, False)]
)
def test_noise_that_is_off_anywhere_fails_the_section(
    error: Callable[[jax.Array], jax.Array], holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_section, "gumbel", lambda *drawn: (noise := gumbel(*drawn)) + error(noise))
    kernel_section._noise(Findings(tmp_path / "found.json"))
    (check,) = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert (check["name"], check["holds"]) == ("noise of sampling", holds), check["detail"]
