"""What a batch says of its command line before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from jdisagg.batch.__main__ import main
from tests.unit.batch.fake_server import serving
from tests.unit.batch.test_batch import arguments

KEY = "JDISAGG_API_KEY"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n')
    return path


def test_a_server_that_refuses_the_key_is_told_of_with_where_the_key_is_read(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(odd={"/v1/models": (401, b'{"error": {"message": "wrong API key"}}')}) as server:
        assert main(arguments(source, source.with_name("out.jsonl"), server.url)) == 2
    said = capsys.readouterr().err
    assert KEY in said
    assert "wrong API key" in said


@pytest.mark.parametrize("flags", [["--api-key", "@file"], ["--api-key=secret"], ["--model", "demo", "--api-key=secret"]])
def test_a_key_beside_a_server_names_where_the_key_is_read(
    source: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(arguments(source, source.with_name("out.jsonl"), "http://127.0.0.1:9", *flags)) == 2
    said = capsys.readouterr().err
    assert f"leave out {flags[0].partition('=')[0]}, the server has its own settings; its API key is read" in said
    assert KEY in said
    assert "secret" not in said


def test_another_flag_beside_a_server_says_nothing_of_keys(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--disagg", "--no-checksums"):
        assert main(arguments(source, source.with_name("out.jsonl"), "http://127.0.0.1:9", flag)) == 2
        assert capsys.readouterr().err == f"jdisagg.batch: --server: leave out {flag}, the server has its own settings\n"


def test_the_help_names_where_the_key_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert KEY in capsys.readouterr().out
