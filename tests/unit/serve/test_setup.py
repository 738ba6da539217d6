"""What scripts/setup.sh finds on a machine."""

from __future__ import annotations

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
