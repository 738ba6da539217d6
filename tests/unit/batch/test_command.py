"""What a batch says of its command line before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

import jdisagg.batch.__main__ as batch
from jdisagg.batch.__main__ import main
from jdisagg.batch.command import parse_command
from jdisagg.core.errors import ConfigError, NotFetched
from tests.unit.batch.command_line import arguments
from tests.unit.batch.fake_server import serving

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


@pytest.mark.parametrize("key", ["schlüssel", "two words", "tab\tbed", "f\x0beed"])
def test_a_key_that_no_header_carries_is_told_of_at_once(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(KEY, key)
    assert main(arguments(source, source.with_name("out.jsonl"), "http://127.0.0.1:9", "--patience-s", "600")) == 2
    said = capsys.readouterr().err
    assert f"{KEY}: a key of {len(key)} characters is not a word of printable ASCII" in said
    assert (said.count("\n"), key in said) == (1, False)


def test_the_help_names_where_the_key_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert KEY in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("127.0.0.1:18010", "http://127.0.0.1:18010"),
        ("localhost/v1", "http://localhost/v1"),
        ("[::1]:80", "http://[::1]:80"),
        ("ftp://host", "http://HOST:PORT"),
        ("http:/host:80", "http://HOST:PORT"),
        ("http://host:port", "http://HOST:PORT"),
        ("http://host:99999999", "http://HOST:PORT"),
        ("http://a host:80", "http://HOST:PORT"),
        ("http://host?a=b", "http://HOST:PORT"),
        ("http://[::1", "http://HOST:PORT"),
        ("[::1", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("", "http://HOST:PORT"),
    ],
)
def test_a_server_that_is_no_url_is_told_of_at_once(
    source: Path, capsys: pytest.CaptureFixture[str], given: str, hint: str
) -> None:
    assert main(arguments(source, source.with_name("out.jsonl"), given, "--patience-s", "600")) == 2
    assert capsys.readouterr().err == f"jdisagg.batch: --server: wanted a URL, got {given!r}; write {hint}\n"
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_a_server_may_be_named_as_openai_clients_name_it(source: Path, end: str) -> None:
    output = source.with_name("out.jsonl")
    with serving() as server:
        assert main(arguments(source, output, server.url + end)) == 0
    assert "on /v1/completions" in output.read_text()


@pytest.mark.parametrize(
    "flag", ["--request-timeout-s=-1", "--request-timeout-s=0", "--request-timeout-s=nan", "--patience-s=nan"]
)
def test_times_that_are_none_are_told_of_at_once(source: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    name, _, value = flag.partition("=")
    with serving() as server:
        assert main(arguments(source, source.with_name("out.jsonl"), server.url, "--patience-s=0.5", flag)) == 2
    said = capsys.readouterr().err
    assert f"{name}: wanted seconds" in said
    assert f"got {value}" in said


@pytest.mark.parametrize("name", ["--input", "--output"])
def test_a_pipe_is_refused_by_name(source: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = source.with_name("out.jsonl")
    given = {"--input": str(source), "--output": str(output)} | {name: "-"}
    assert main([word for pair in given.items() for word in pair] + ["--server", "http://127.0.0.1:9"]) == 2
    assert f"{name}: a batch that can be resumed needs a file, not a pipe; name one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "flaw"),
    [
        ("", "'.' is a directory"),  # of a variable that is not set
        (".", "'.' is a directory"),
        ("..", "'..' is a directory"),
        ("/", "'/' is a directory"),
        ("one", "'one' cannot be used: "),
        ("one/out.jsonl", "no directory 'one'"),
    ],
)
def test_an_output_that_is_no_file_and_never_will_be_is_refused(
    source: Path, output: str, flaw: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    for link, other in (("one", "two"), ("two", "one")):
        Path(link).symlink_to(other)
    command = ["--input", str(source), "--output", output, "--server", "http://127.0.0.1:9", "--patience-s", "600"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"jdisagg.batch: --output: {flaw}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("error", "status"), [(NotFetched, 1), (ConfigError, 2)])
def test_an_engine_that_cannot_be_started_now_may_be_by_the_same_command(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: type[ConfigError], status: int
) -> None:
    def refuse(_: object) -> None:
        raise error("--model: the Hub says nothing")

    monkeypatch.setattr(batch, "_open_client", refuse)
    command = ["--input", str(source), "--output", str(source.with_name("out.jsonl")), "--model", "someone/model"]
    assert main(command, what_next="begin anew") == status
    told = ["jdisagg.batch: --model: the Hub says nothing", "jdisagg.batch: begin anew"]
    assert capsys.readouterr().err.splitlines() == told[: 2 // status]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["--role", "prefill"], "the engine of a batch has both phases; remove it"),
        (["--disagg", "--role=unified"], "the engine of a batch has both phases; remove it"),
        (["--router", "127.0.0.1:9000"], "and serves nobody; remove it, or ask a server that runs, by --server"),
        (["--port=8000"], "and serves nobody; remove it, or ask a server that runs, by --server"),
        (["--num-prefill", "2"], "and serves nobody; remove it, or ask a server that runs, by --server"),
        (["--decode-tp", "2"], "and serves nobody; remove it, or add --disagg, or ask a server that runs, by --server"),
        (["--disagg", "--prefill", "127.0.0.1:9001"], "and serves nobody; remove it, or ask a server that runs, by --server"),
    ],
)
def test_flags_of_processes_that_a_batch_is_not_are_refused(
    source: Path, capsys: pytest.CaptureFixture[str], flags: list[str], advice: str
) -> None:
    output = source.with_name("out.jsonl")
    assert main(["--input", str(source), "--output", str(output), *flags]) == 2
    name = next(flag for flag in flags if flag != "--disagg").partition("=")[0]
    said = capsys.readouterr().err
    assert said.startswith(f"jdisagg.batch: {name}: ")
    assert advice in said
    assert not output.exists()


def test_flags_of_its_engine_are_those_of_serve(source: Path) -> None:
    command = ["--input", str(source), "--output", str(source.with_name("out.jsonl")), "--disagg"]
    flags = ["--decode-tp", "2", "--block-size=8", "--local-prefill", "never", "--served-model-name", "router"]
    config = parse_command([*command, *flags]).batch.config
    assert config is not None
    assert (config.role, config.local.decode_tp, config.cache.page_size) == ("colocated", 2, 8)
    assert config.model.served_model_name == "router"
