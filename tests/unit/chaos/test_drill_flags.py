"""What the drills are told to do is checked before a fleet is started for it."""

from __future__ import annotations

import sys

import drills
import pytest
from chaos_kit.act import Blow, Victim
from chaos_kit.stages import Stage


def test_names_become_what_they_stand_for_and_all_are_meant_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["drills.py", "--stages", "decoding,transferring", "--victims", "D"])
    arguments = drills.parse()
    assert arguments.stages == [Stage.DECODING, Stage.TRANSFERRING]
    assert arguments.victims == [Victim.DECODE]
    assert arguments.blows == list(Blow)
    assert arguments.roles == ["P", "D"]


@pytest.mark.parametrize("flag", ["--stages", "--victims", "--blows", "--troubles", "--roles", "--cuts"])
def test_a_name_that_is_none_is_told(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["drills.py", flag, "decodin"])
    with pytest.raises(SystemExit, match="2"):
        drills.parse()
    assert f"argument {flag}: got decodin, wanted some of " in capsys.readouterr().err
