"""The shipped configuration files load, and print as something that loads equal."""

import subprocess
import sys
from pathlib import Path

import pytest

from jdisagg.core.settings import load_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo-local", "llama3-8b-h200", "llama3-70b-v6e-8", "qwen3-32b-v5p"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_print_config_of_a_shipped_file_loads_back_equal(path: Path, tmp_path: Path) -> None:
    extra = ["--prefill", "127.0.0.1:9000"] if load_config(["--config", str(path)], {}).role == "decode" else []
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg.serve", "--config", str(path), "--print-config", *extra],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    printed = tmp_path / "printed.toml"
    printed.write_text(done.stdout)
    assert load_config(["--config", str(printed)], {}) == load_config(["--config", str(path), *extra], {})
