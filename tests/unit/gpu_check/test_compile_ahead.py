"""What is compiled ahead is what the engine asks for: it finds every step, and compiles none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
AHEAD = """
import os, sys
from pathlib import Path
from gpu_kit.batch_section import _config
from gpu_kit.compile_ahead import compile_ahead
from gpu_kit.findings import Clock
from gpu_kit.setting import Setting
from gpu_kit.shapes import batch_shape
import jax
from jdisagg.core.requests import Role
from jdisagg.engine.build import make_runner
from jdisagg.engine.warmup import warm_up
from jdisagg.models.load import load_model
from jdisagg.models.sharding import make_mesh

out = Path(sys.argv[1])
setting = Setting(name="batch", out=out, scratch=out, small=True, clock=Clock(300.0))
config = _config(setting, batch_shape(small=True).write(out / "model", 64), True)


def steps():
    kept = os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])
    return sorted(name for name in kept if name.startswith(("jit_prefill", "jit_decode")) and name.endswith("-cache"))


count = compile_ahead(config, 200.0)
ahead = steps()
mesh = make_mesh(jax.devices()[:1], 1)
warm_up(make_runner(load_model(config.model, mesh, seed=0), mesh, config, Role.UNIFIED))
print(count, len(ahead), steps() == ahead)
"""


@pytest.mark.timeout(400)
def test_the_engine_finds_the_steps_that_were_compiled_ahead(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-c", AHEAD, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["2", "2", "True"]
