"""A TOML file for tests of settings."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str) -> str:
        path = tmp_path / "conf.toml"
        path.write_text(text)
        return str(path)

    return write_text
