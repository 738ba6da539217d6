"""The flags of a section's workers, sized as those workers will be, on a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_kit.findings import Clock, Findings
from gpu_kit.servers import check_bits, engine_flags
from gpu_kit.setting import Setting

from jdisagg.aot.abstract import ModelForm, bytes_per_device
from jdisagg.aot.accelerators import read_accelerators
from jdisagg.aot.planned import planned_mesh
from jdisagg.core.config import LayerLoop
from jdisagg.core.requests import Role
from jdisagg.core.settings import load_config
from jdisagg.engine.sizing import DeviceMemory, size_engine
from jdisagg.models.resolve import read_model_config
from jdisagg.models.spec import ModelSpec


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_both_engines_of_a_colocated_process_fit_one_device(tmp_path: Path, device: str, small: bool) -> None:
    setting = Setting(name="colocated", out=tmp_path, scratch=tmp_path, small=small, clock=Clock(10.0))
    config = load_config(["--role", "colocated", *engine_flags(setting, share=False)])
    spec, dtype, mesh = (
        ModelSpec.from_config(read_model_config(config.model.model)),
        config.model.dtype,
        planned_mesh("cuda", 1),
    )
    form = ModelForm(spec=spec, dtype=dtype, kv_dtype=dtype, layer_loop=LayerLoop.UNROLLED)
    layout = form.layout(mesh, config.cache.page_size)
    limit_bytes = read_accelerators()[device].limit_bytes({})
    assert limit_bytes is not None
    in_use_bytes = 0
    for role in (Role.PREFILL, Role.DECODE):  # one after the other: what the first has taken is in use for the second
        in_use_bytes += bytes_per_device(form.params(mesh))
        memory = DeviceMemory(limit_bytes=limit_bytes, in_use_bytes=in_use_bytes)
        sizes = size_engine(spec, layout, config, role, lambda memory=memory: [memory])
        in_use_bytes += sizes.num_pages * layout.bytes_per_page
    assert in_use_bytes < limit_bytes


@pytest.mark.parametrize(
    ("p", "d", "unified", "holds"),
    [("a48-1", "a48-1", "a48-1", True), ("a48-1", "a48-2", "a48-1", False), (None, None, None, False), ("a", "a", "b", False)],
)
def test_whose_bits_are_off_is_told(tmp_path: Path, p: str | None, d: str | None, unified: str | None, holds: bool) -> None:
    check_bits(Findings(tmp_path / "f.json"), P=p, D=d, unified=unified)
    [check] = json.loads((tmp_path / "f.json").read_text())["checks"]
    assert check == {
        "name": "P, D, unified compute the same bits",
        "holds": holds,
        "detail": f"P {p}, D {d}, unified {unified}",
    }
