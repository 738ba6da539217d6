"""Keys of the API: where they come from, which are refused, and that none is ever printed."""

from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.printed import to_flags, to_toml
from jdisagg.core.settings import load_config
from jdisagg.core.values import keys_of
from tests.unit.core.loading import load, message


def test_the_api_key_comes_from_a_file_or_the_environment_and_is_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    from_file = load("--api-key", f"@{path}")
    assert from_file.server.api_key == "s3cret"
    assert load_config([], {"JDISAGG_API_KEY": "from-env"}).server.api_key == "from-env"
    assert load_config([], {"JDISAGG_API_KEY": "from-echo\n"}).server.api_key == "from-echo"
    assert "s3cret" not in to_toml(from_file) + " ".join(to_flags(from_file))
    assert "# api_key is set" in to_toml(from_file)
    path.write_bytes(b"\xef\xbb\xbfs3cret\r\n")  # as Windows writes it
    assert load("--api-key", f"@{path}").server.api_key == "s3cret"
    path.write_bytes(b"n3w\r\n\r\n s3cret \r\n")
    assert keys_of(load("--api-key", f"@{path}").server.api_key) == ("n3w", "s3cret")
    path.write_text("\n")
    assert "is empty" in message("--api-key", f"@{path}")
    assert "more than 65536 characters" in message("--api-key", "@/dev/zero")
    path.write_text("s3cret\n" * 2**14)  # the last one would be let in by its beginning
    assert "more than 65536 characters" in message("--api-key", f"@{path}")


def test_a_key_and_a_router_that_are_set_and_empty_are_no_open_server_and_no_lonely_worker() -> None:
    for empty in ("", "\n"):
        with pytest.raises(ConfigError, match="JDISAGG_API_KEY is set and empty: unset it"):
            load_config([], {"JDISAGG_API_KEY": empty})
    for empty in ("", " , "):
        assert message("--role", "prefill", "--router", empty).startswith(f"--router: got {empty!r}, wanted HOST:PORT,..")


@pytest.mark.parametrize("key", ["two words", "schlüssel", "tab\tbed", "bell\a", "line\x0bfeed"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match=f"--api-key: a key of {len(key)} characters is not a word") as caught:
        load_config([], {"JDISAGG_API_KEY": f"g00d\n{key}"})
    assert key not in caught.value.message


def test_the_key_of_clients_is_another_one_beside_the_api_key_and_is_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("f0r-clients\n")
    environ = {"JDISAGG_API_KEY": "operators"}
    from_file = load_config(["--client-api-key", f"@{path}"], environ)
    assert (from_file.server.api_key, from_file.server.client_api_key) == ("operators", "f0r-clients")
    assert load_config([], environ | {"JDISAGG_CLIENT_API_KEY": "f0r-clients"}).server == from_file.server
    assert "f0r-clients" not in to_toml(from_file) + " ".join(to_flags(from_file))
    with pytest.raises(ConfigError, match="--client-api-key: got the same key as for --api-key"):
        load_config([], {"JDISAGG_API_KEY": "new\nold", "JDISAGG_CLIENT_API_KEY": "f0r-clients\nold"})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"JDISAGG_CLIENT_API_KEY": "c"}, "--client-api-key: got it without --api-key"),
        ({"JDISAGG_CLIENT_API_KEY": "c", "JDISAGG_API_KEY": "c"}, "--client-api-key: got the same key as for --api-key"),
        ({"JDISAGG_CLIENT_API_KEY": "a b", "JDISAGG_API_KEY": "c"}, "--client-api-key: a key of 3 characters is not a word"),
        ({"JDISAGG_CLIENT_API_KEY": "", "JDISAGG_API_KEY": "c"}, "JDISAGG_CLIENT_API_KEY is set and empty: unset it"),
    ],
)
def test_a_key_of_clients_that_protects_nothing_is_refused(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config([], environ)
