"""Why a file could not be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from jdisagg.core.files import why


def test_a_file_that_is_somebody_elses_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    told = why(Path("m.safetensors"), FileNotFoundError("No such file or directory: m.safetensors"))
    assert told.startswith("Permission denied; let user ")


def test_a_note_of_git_is_told_from_a_broken_file(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert why(file, ValueError("broken")).endswith("run git lfs pull")
    file.write_text("x")
    assert why(file, ValueError("broken")) == "broken; copy the file again"
