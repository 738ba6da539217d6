"""What scripts/setup.sh finds on a machine, and what the scripts that take long say when they are only asked what they do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.serve.test_tpu import GOOGLE, NETWORK_CARD, TPU7X, V6E, pci

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("cards", "found"),
    [
        ([(GOOGLE, V6E)], "tpu"),
        ([(GOOGLE, NETWORK_CARD), (GOOGLE, TPU7X)], "tpu"),
        ([(GOOGLE, NETWORK_CARD)], "not"),
        ([], "not"),
    ],
)
def test_the_setup_finds_a_tpu_by_its_card(tmp_path: Path, cards: list[tuple[str, str]], found: str) -> None:
    script = (ROOT / "scripts/setup.sh").read_text()
    function = script[script.index("has_tpu() {") :].partition("\n}\n")[0] + "\n}\n"
    command = f'{function}\nif has_tpu "$1"; then echo tpu; else echo not; fi'
    done = subprocess.run(
        ["bash", "-euc", command, "setup", str(pci(tmp_path, *cards))], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == found


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["setup.sh", "test.sh", "mutation.sh", "h200_gates.sh"])
def test_who_asks_a_script_what_it_does_is_told_and_nothing_runs(tmp_path: Path, name: str, flag: str) -> None:
    done = run_alone(tmp_path, name, flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name} [" in done.stdout
    assert "#" not in done.stdout
    assert "pipefail" not in done.stdout


def test_gates_of_an_extent_that_there_is_none_of_are_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run_alone(tmp_path, "h200_gates.sh", "some")
    assert (done.returncode, done.stderr) == (2, "h200_gates.sh: wanted few, steps or all, got some\n")


def run_alone(tmp_path: Path, name: str, argument: str) -> subprocess.CompletedProcess[str]:
    """Where nothing is that it could start."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return subprocess.run(["bash", script, argument], capture_output=True, text=True, timeout=60, check=False)
