"""Flags and TOML files become a Config, or one line that says what to change."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core import foreign_flags
from jdisagg.core.config import Config, LocalPrefill, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import BY_NAME, FLAGS, ROLES, SECTIONS
from jdisagg.core.printed import to_flags, to_toml
from jdisagg.core.scope import applies
from jdisagg.core.settings import SECTION_TYPES, build_parser, load_config
from jdisagg.core.values import keys_of

NO_ENV: dict[str, str] = {}


def load(*argv: str) -> Config:
    return load_config(argv, NO_ENV)


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str) -> str:
        path = tmp_path / "conf.toml"
        path.write_text(text)
        return str(path)

    return write_text


def test_the_table_names_exactly_the_config_fields() -> None:
    derived = {"local_prefill_below_tokens"}  # written as below-tokens=N
    wanted = {(section, f.name) for section, kind in SECTION_TYPES.items() for f in fields(kind) if f.name not in derived}
    assert {(flag.section, flag.name) for flag in FLAGS} == wanted
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("of_file", [False, True])
@pytest.mark.parametrize(
    ("role", "wanted", "foreign"),
    [
        *((role, "auto, grpc, tcp, shm, jax", "device_put") for role in ("prefill", "decode", "local")),
        ("colocated", "auto, device_put", "tcp"),
    ],
)
def test_a_role_is_offered_the_backends_that_it_has(write, role: str, wanted: str, foreign: str, of_file: bool) -> None:
    for got in ("foo", foreign):
        if of_file:
            path = write(f'[transfer]\nkv_transfer_backend = "{got}"\n')
            where, arguments = f"{path} [transfer] kv_transfer_backend", ["--config", path, "--role", role]
        else:
            where, arguments = "--kv-transfer-backend", ["--kv-transfer-backend", got, "--role", role]
        assert message(*arguments) == f"{where}: got {got!r}, wanted one of {wanted} with --role {role}"
    for choice in wanted.split(", "):
        assert load("--kv-transfer-backend", choice, "--role", role).transfer.kv_transfer_backend == choice


def test_no_arguments_give_the_defaults() -> None:
    assert load() == Config()


def test_flags_set_typed_fields() -> None:
    config = load(
        *["--role", "decode", "--block-size", "32", "--prefill", "a:1,[::1]:2", "--kv-cache-bytes", "1.5GiB"],
        *["--numerics", "exact", "--no-checksums", "--lease-s", "3", "--local-prefill", "below-tokens=9", "--devices", "0-1,3"],
    )
    assert config.cache.page_size == 32
    assert config.cache.kv_cache_bytes == 3 * 2**29
    assert config.transfer.prefill == ("a:1", "[::1]:2")
    assert config.model.numerics is Numerics.EXACT
    assert config.transfer.checksums is False
    assert config.transfer.lease_s == 3.0
    assert (config.transfer.local_prefill, config.transfer.local_prefill_below_tokens) == (LocalPrefill.BELOW_TOKENS, 9)
    assert config.device.devices == "0-1,3"


def test_flag_wins_over_file_and_file_over_default(write) -> None:
    path = write('role = "prefill"\n[cache]\npage_size = 8\n[scheduler]\nmax_num_seqs = 3\n')
    config = load("--config", path, "--page-size", "64")
    assert (config.role, config.cache.page_size, config.scheduler.max_num_seqs) == ("prefill", 64, 3)
    assert config.scheduler.max_queue_len == Config().scheduler.max_queue_len


@pytest.mark.parametrize(
    "host", ["10.0.0.7", "fd00::7", "[fd00::7]", "fe80::1%eth0", "decode-0.decode", "my_host", "xn--bcher-kva"]
)
def test_others_reach_a_process_by_name_or_address(host: str) -> None:
    assert load("--role", "decode", "--advertise-host", host).server.advertise_host == host


def test_a_flat_file_works_and_model_may_be_key_or_section(write) -> None:
    config = load("--config", write('role = "unified"\nmodel = "dir"\nblock_size = 4\nprefill = ["h:1"]\n'))
    assert (config.model.model, config.cache.page_size, config.transfer.prefill) == ("dir", 4, ("h:1",))
    assert load("--config", write('[model]\nmodel = "other"\n')).model.model == "other"


def test_a_pool_size_flag_replaces_another_pool_size_of_the_file(write) -> None:
    config = load("--config", write("[cache]\nnum_pages = 9\n"), "--kv-cache-bytes", "1MiB")
    assert (config.cache.num_pages, config.cache.kv_cache_bytes) == (None, 2**20)


@pytest.mark.covers("V43")
@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--pge-size", "3"], "--pge-size: unknown flag; did you mean --page-size?"),
        (["--bogus"], "--bogus: unknown flag; see --help for the list"),
        (["--zzz"], "--zzz: unknown flag; see --help for the list"),
        (["--tp-size", "2"], "--tp-size: unknown flag; it is called --tensor-parallel-size here"),
        (["--mem-fraction-static=0.8"], "--mem-fraction-static: unknown flag; it is called --device-memory-utilization here"),
        (["--enable-metrics"], "--enable-metrics: unknown flag; GET /metrics is always served"),
        (["--role", "local", "--port", "8", "--grpc-port", "8"], "--grpc-port: got 8, wanted another than --port, or 0 for a"),
        (["demo"], "demo: unexpected argument; settings are flags like --model demo"),
        (["--role", "boss"], "--role: got 'boss', wanted one of unified, prefill, decode, colocated, router, local"),
        (["--page-size", "x"], "--page-size: got 'x', wanted a whole number"),
        (["--page-size", "1.5"], "--page-size: got '1.5', wanted a whole number"),
        (["--page-size", "0"], "--page-size: got 0, wanted at least 1"),
        (["--port", "65536"], "--port: got 65536, wanted at most 65535"),
        (["--lease-s", "nan"], "--lease-s: got 'nan', wanted a finite number"),
        (["--lease-s", "soon"], "--lease-s: got 'soon', wanted a number"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy: got 'lifo', wanted one of fcfs, priority"),
        (["--numerics", "best"], "--numerics: got 'best', wanted one of exact, fast"),
        (
            ["--local-prefill", "below-tokens"],
            "--local-prefill: got 'below-tokens', wanted below-tokens=N with a whole number N",
        ),
        (
            ["--local-prefill", "sometimes"],
            "--local-prefill: got 'sometimes', wanted one of on-failure, never, below-tokens=N",
        ),
        (["--local-prefill", "below-tokens=-1"], "wanted below-tokens=N with a whole number N"),
        (["--prefill", "host"], "--prefill: got 'host', wanted HOST:PORT with a port of 1 to 65535"),
        (
            ["--router", "$(ROUTER_HOST):9000"],
            "--router: got '$(ROUTER_HOST):9000', wanted HOST:PORT with a port of 1 to 65535",
        ),
        (["--advertise-host", "$(POD_IP)"], "--advertise-host: got '$(POD_IP)', wanted a host name or an address, without"),
        (
            ["--advertise-host", "10.0.0.7:9000"],
            "--advertise-host: got '10.0.0.7:9000', wanted a host name or an address, without",
        ),
        (
            ["--advertise-host", "http://h"],
            "--advertise-host: got 'http://h', wanted a host name or an address, without a port",
        ),
        (["--advertise-host", "0.0.0.0"], "--advertise-host: got '0.0.0.0', wanted what others reach; a wildcard they take"),
        (["--advertise-host", "[::]"], "--advertise-host: got '[::]', wanted what others reach; a wildcard they take"),
        (["--prefill", "h:0"], "--prefill: got 'h:0', wanted HOST:PORT with a port of 1 to 65535"),
        (["--prefill", "h:1,h:1"], "--prefill: got 'h:1,h:1', wanted every address once"),
        (["--devices", "3-1"], "--devices: got '3-1', wanted ascending indices up to 4095"),
        (["--cpu-affinity", "all"], "--cpu-affinity: got 'all', wanted indices like 0-3,5"),
        (
            ["--kv-cache-bytes", "8 gigs"],
            "--kv-cache-bytes: got '8 gigs', wanted a number of bytes like 536870912, 512MiB or 8GiB",
        ),
        (["--api-key", "hunter2"], "--api-key: a secret is not given in the open; put it in a file and pass @FILE"),
        (["--api-key", "@~nobody-of-that-name/key"], "--api-key: got '~nobody-of-that-name/key', wanted a path without ~"),
        (["--num-pages", "9", "--kv-cache-bytes", "9"], "--kv-cache-bytes: got it beside --num-pages; keep one of them"),
        (["--max-num-batched-tokens", "4"], "--max-num-batched-tokens: got 4, wanted at least --max-num-seqs = 16"),
        (["--enable-kv-events", "--no-enable-prefix-caching"], "--enable-kv-events: got True, wanted prefix caching"),
        (["--kv-events-buffer", "0"], "--kv-events-buffer: got 0, wanted at least 1"),
        (["--dead-after-s", "0.3"], "--dead-after-s: got 0.3, wanted at least twice --heartbeat-s = 0.25"),
        (["--role", "decode", "--local-prefill", "never"], "wanted a way to prefill: give --prefill or --router"),
        (["--num-prefill", "0", "--local-prefill", "never"], "--num-prefill: got 0, wanted at least 1 with --local-prefill"),
        (["--schedule-log", "no/such/log"], "--schedule-log: got 'no/such/log', wanted a file in a directory that exists"),
        (["--config", "no/such.toml"], "--config: cannot read 'no/such.toml': No such file or directory"),
    ],
)
def test_a_bad_flag_says_what_it_got_and_what_to_change(argv: list[str], wanted: str) -> None:
    assert wanted in message(*argv)


def test_who_decodes_nothing_needs_no_step_for_all_its_slots() -> None:
    assert load("--role", "prefill", "--max-num-batched-tokens", "4").scheduler.max_num_batched_tokens == 4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[cache]\npge_size = 3\n", "[cache] pge_size: unknown key; did you mean page_size?"),
        ("[cache]\nmax_num_seqs = 3\n", "[cache] max_num_seqs: this key belongs to [scheduler]; move it there"),
        ("[cahce]\npage_size = 3\n", "cahce: unknown key; did you mean cache?"),
        ("pge_size = 3\n", "pge_size: unknown key; did you mean page_size?"),
        ("page_size = 3\nblock_size = 4\n", "page_size is set twice"),
        ('[cache]\npage_size = "16"\n', "[cache] page_size: got '16', wanted a whole number"),
        ("[cache]\npage_size = true\n", "[cache] page_size: got True, wanted a whole number"),
        ("[transfer]\nchecksums = 1\n", "[transfer] checksums: got 1, wanted true or false"),
        ("[transfer]\nlease_s = 0\n", "[transfer] lease_s: got 0.0, wanted at least 0.1"),
        ("[model]\nmodel = 3\n", "[model] model: got 3, wanted a non-empty string"),
        ("[transfer]\nprefill = [3]\n", "[transfer] prefill: got [3], wanted addresses HOST:PORT"),
        (
            '[server]\nallowed_origins = ["*", "*"]\n',
            "[server] allowed_origins: got ['*', '*'], wanted every origin once",
        ),
        (
            '[server]\nallowed_origins = "https://a.b/c"\n',
            "[server] allowed_origins: got 'https://a.b/c', wanted '*' or an origin",
        ),
        (
            '[server]\nallowed_origins = "A.b"\n',
            "[server] allowed_origins: got 'A.b', wanted '*' or an origin as browsers send",
        ),
        ('[server]\napi_key = "hunter2"\n', "[server] api_key: a secret is not given in the open"),
        ('[server]\napi_key = "@\\u0000"\n', "[server] api_key: cannot read the file '\\x00'"),
        ("role = 3\n", "role: got 3, wanted one of unified"),
        ("[cache\n", "is not TOML"),
        (f"num_pages = {'9' * 5000}\n", "is not TOML: Exceeds the limit"),
        (f"num_pages = {'[' * 5000}\n", "is not TOML: maximum recursion depth exceeded"),
        (f"drain_s = {'9' * 400}\n", "wanted a finite number"),
        ('[scheduler]\nschedule_log = "a\\u0000b"\n', "[scheduler] schedule_log: got 'a\\x00b', wanted a string without NUL"),
        ("server = 5\n", "server: got 5, wanted the section [server]"),
        ("[[server]]\nport = 5\n", "server: got [{'port': 5}], wanted the section [server]"),
    ],
)
def test_a_bad_file_names_file_section_and_key(write, text: str, wanted: str) -> None:
    got = message("--config", write(text))
    assert wanted in got
    assert "conf.toml" in got
    assert "hunter2" not in got


def test_origins_are_a_list_as_browsers_send_them(write) -> None:
    wanted = ("https://chat.example:3000", "http://[::1]:8080", "app://localhost")
    config = load("--allowed-origins", "https://chat.example:3000, http://[::1]:8080,app://localhost")
    assert config.server.allowed_origins == wanted
    assert load(*to_flags(config)).server.allowed_origins == wanted
    assert load("--config", write(to_toml(config))).server.allowed_origins == wanted
    assert load("--allowed-origins", "*").server.allowed_origins == ("*",)
    assert load().server.allowed_origins == ()


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


FOREIGN = {  # flag -> the roles that take it
    "--prefill h:1": {"decode"},
    "--router h:1": {"unified", "prefill", "decode", "colocated"},
    "--advertise-host h": {"unified", "prefill", "decode", "colocated"},
    "--advertise-port 9": {"unified", "prefill", "decode", "colocated"},
    "--local-prefill on-failure": {"decode", "colocated", "local"},
    "--want-min-tokens 1": {"prefill", "colocated", "local"},
    "--num-prefill 1": {"local"},
    "--num-decode 1": {"local"},
    "--replay-budget 0.5": {"router", "local"},
    "--worker-wait-s 9": {"router", "local"},
    "--prefill-tp 1": {"local", "colocated"},
    "--decode-tp 1": {"local", "colocated"},
    "--num-scheduler-steps 2": {"unified", "decode", "colocated", "local"},
    "--host-kv-bytes 1GiB": {"unified", "decode", "colocated", "local"},
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("flag", FOREIGN)
def test_a_flag_of_another_role_is_refused_and_says_whose_it_is(flag: str, role: str) -> None:
    name = flag.split(maxsplit=1)[0]
    argv = ["--role", role, *flag.split()]
    if role in FOREIGN[flag]:
        assert load(*argv).role == role
        return
    got = message(*argv)
    assert got.startswith(f"{name}: means nothing to --role {role}; it is for --role ")
    assert all(other in got for other in FOREIGN[flag])
    assert BY_NAME[name[2:].replace("-", "_")].help in got
    assert got.endswith("remove it, or choose that role")
    assert "\n" not in got


def test_prefill_workers_may_be_named_beside_routers() -> None:
    both = load("--role", "decode", "--prefill", "127.0.0.1:9001", "--router", "127.0.0.1:9000")
    assert (both.transfer.prefill, both.server.router) == (("127.0.0.1:9001",), ("127.0.0.1:9000",))
    assert "with or without a router" in BY_NAME["prefill"].help
    assert "(prefill workers of a decode worker, with or without a router" in message("--role", "prefill", "--prefill", "h:1")


def test_the_table_above_has_every_flag_that_only_some_roles_take() -> None:
    assert {flag.option: set(flag.only) for flag in FLAGS if flag.only} == {k.split()[0]: v for k, v in FOREIGN.items()}


def test_the_role_of_a_file_decides_what_a_flag_means(write) -> None:
    path = write('role = "decode"\n')
    assert load("--config", path, "--prefill", "h:1").transfer.prefill == ("h:1",)
    assert "--num-decode: means nothing to --role decode" in message("--config", path, "--num-decode", "2")


def test_keys_of_other_roles_in_a_shared_file_are_remarked_once_and_defaults_never(
    write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write('[transfer]\nprefill = ["h:1"]\n[local]\nnum_prefill = 3\nnum_decode = 1\n[cache]\npage_size = 32\n')
    for role, wanted in (
        ("prefill", ["[transfer] prefill, [local] num_prefill: means nothing to --role prefill, ignored"]),
        ("decode", ["[local] num_prefill: means nothing to --role decode, ignored"]),
        ("router", ["[transfer] prefill, [local] num_prefill: means nothing to --role router, ignored"]),
        ("local", ["[transfer] prefill: means nothing to --role local, ignored"]),
    ):
        caplog.clear()
        assert load("--config", path, "--role", role).cache.page_size == 32
        assert [record.message for record in caplog.records] == [f"{path}: {text}" for text in wanted]


def test_engine_settings_on_a_routers_command_line_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    load("--role", "router", "--model", "demo", "--port", "1", "--heartbeat-s", "0.5", "--step-timeout-s", "9")
    load("--role", "router", "--tool-call-parser", "hermes")
    assert not caplog.records
    load("--role", "router", "--page-size", "32", "--dtype", "float32")
    assert [record.message for record in caplog.records] == ["--page-size, --dtype: means nothing to --role router, ignored"]
    caplog.clear()
    load("--role", "prefill", "--tool-call-parser", "hermes")
    assert [record.message for record in caplog.records] == ["--tool-call-parser: means nothing to --role prefill, ignored"]


def test_children_get_only_flags_that_mean_something_to_them() -> None:
    config = load("--role", "local", "--local-prefill", "never", "--page-size", "32", "--num-prefill", "2", "--prefill-tp", "2")
    roles = {role: " ".join(to_flags(replace(config, role=role))) for role in ("router", "prefill", "decode")}
    assert roles == {
        "router": "--role router",
        "prefill": "--role prefill --page-size=32",
        "decode": "--role decode --page-size=32 --local-prefill=never",
    }


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5"])
@pytest.mark.parametrize("flag", ["--page-size", "--kv-cache-bytes", "--devices", "--local-prefill"])
def test_a_number_beyond_all_bounds_is_named(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: got "):
        load(flag, f"below-tokens={text}" if flag == "--local-prefill" else text)


def test_a_step_has_no_more_tokens_than_memory_for_their_ids() -> None:
    assert load("--max-num-batched-tokens", str(2**24)).scheduler.max_num_batched_tokens == 2**24
    assert message("--max-num-batched-tokens", str(2**24 + 1)).startswith("--max-num-batched-tokens: got ")


def test_a_value_that_begins_with_a_dash_reaches_a_child() -> None:
    with NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write('model = "-odd"')
        file.flush()
        config = load("--role", "unified", "--config", file.name)
    assert load(*to_flags(config)).model == config.model


argv_strategy = st.fixed_dictionaries(
    {},
    optional={
        "--role": st.sampled_from(["unified", "prefill", "decode", "router"]),
        "--model": st.sampled_from(["demo", 'a dir/with "quotes" and é']),
        "--page-size": st.integers(1, 1024).map(str),
        "--num-pages": st.integers(2, 10**9).map(str),
        "--prefill": st.lists(st.integers(1, 65535), unique=True, max_size=3).map(lambda p: ",".join(f"h:{x}" for x in p)),
        "--local-prefill": st.sampled_from(["on-failure", "below-tokens=0", "below-tokens=77"]),
        "--lease-s": st.floats(0.1, 1e6).map(str),
        "--layer-loop": st.sampled_from(["auto", "unrolled", "scan"]),
        "--devices": st.sampled_from(["0", "0-3,7"]),
    },
)


@given(argv_strategy, st.booleans())
def test_printed_config_and_child_flags_load_back_equal(flags: dict[str, str], checksums: bool) -> None:
    role = flags.get("--role", "local")
    mine = {
        name: value for name, value in flags.items() if name == "--role" or applies(BY_NAME[name[2:].replace("-", "_")], role)
    }
    switch = [] if role == "router" else ["--checksums" if checksums else "--no-checksums"]
    config = load(*[part for pair in mine.items() for part in pair], *switch)
    assert load(*to_flags(config)) == config
    with NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(to_toml(config))
        file.flush()
        assert load("--config", file.name) == config


def test_settings_import_neither_jax_nor_numpy_nor_grpc() -> None:
    modules = "jdisagg.core.settings, jdisagg.core.metrics, jdisagg.core.logs"
    code = f"import sys, {modules}; print([m for m in ('jax', 'numpy', 'grpc') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "[]"


def test_every_section_is_printed_in_order() -> None:
    printed = [line[1:-1] for line in to_toml(Config()).splitlines() if line.startswith("[")]
    assert tuple(printed) == SECTIONS


def test_foreign_flags_are_called_as_ours_are_and_none_of_them_is_ours() -> None:
    ours = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(foreign_flags._CALLED.values()) <= ours
    assert not {name for name in (*foreign_flags._CALLED, *foreign_flags._NOTHING) if name in ours}


def test_vllms_switch_for_tool_calls_is_told_what_reads_them() -> None:
    with pytest.raises(
        ConfigError, match=r"--enable-auto-tool-choice: unknown flag; tool calls are read .* --tool-call-parser"
    ):
        load("--enable-auto-tool-choice")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("qwen", "it is called hermes here"),
        ("llama3", "it is called llama3_json here"),
        ("qwen3_coder", "force calls by tool_ch"),
    ],
)
def test_parsers_of_other_servers_are_told_what_to_write(write, value: str, told: str) -> None:
    wanted = f"got '{value}', wanted one of auto, none, hermes, llama3_json, mistral; .*{told}"
    with pytest.raises(ConfigError, match=f"--tool-call-parser: {wanted}"):
        load("--tool-call-parser", value)
    with pytest.raises(ConfigError, match=wanted):
        load("--config", write(f"[model]\ntool_call_parser = '{value}'\n"))


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("-tp", "it is called --tensor-parallel-size here"),
        ("--gpu-memory-utilization", "it is called --device-memory-utilization here"),
        ("--max-seq-len", "it is called --max-model-len here"),
        ("--chat-template", "write it there"),
        ("--reasoning-parser", "thoughts stay part of content"),
        ("--tokenizer", "the tokenizer is that of --model"),
        ("--tool-parser-plugin", "formats of calls are those of --tool-call-parser"),
        ("--enable-lora", "merge them into the model"),
        ("--quantization", "weights are not quantized"),
        ("--speculative-config", "tokens are not drafted"),
        ("--structured-outputs-config", "llguidance alone"),
    ],
)
def test_flags_of_habit_are_told_what_to_do_instead(write, flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: unknown flag; .*{told}"):
        load(flag, "x")
    if flag.startswith("--"):
        key = flag[2:].replace("-", "_")
        with pytest.raises(ConfigError, match=rf"\[model\] {key}: unknown key; .*{told}"):
            load("--config", write(f"[model]\n{key} = 'x'\n"))


def test_help_names_the_flag_that_is_no_setting() -> None:
    """`serve --version` is answered before settings are read."""
    assert "--version" in build_parser().format_help()
