"""Flags and TOML files become a Config, or one line that says what to change."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from jdisagg.core.config import Config, LocalPrefill, Numerics
from jdisagg.core.errors import ConfigError
from jdisagg.core.flags import FLAGS
from jdisagg.core.printed import to_flags, to_toml
from jdisagg.core.settings import SECTION_TYPES
from tests.unit.core.loading import load, message


def test_every_config_field_is_a_flag() -> None:
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
        (
            ["--router", "fd00::1:9000"],
            "--router: got 'fd00::1:9000', wanted HOST:PORT with a port of 1 to 65535, an IPv6 host in brackets: [HOST]:PORT",
        ),
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
        (["--max-num-seqs", "0"], "--max-num-seqs: got 0, wanted at least 1"),
        (["--max-queue-len", "0"], "--max-queue-len: got 0, wanted at least 1"),
        (["--num-scheduler-steps", "0"], "--num-scheduler-steps: got 0, wanted at least 1"),
        (["--long-prefill-token-threshold", "-1"], "--long-prefill-token-threshold: got -1, wanted at least 0"),
        (["--max-num-kv-read-tokens", "-1"], "--max-num-kv-read-tokens: got -1, wanted at least 0"),
        (["--priority-aging-s", "-1"], "--priority-aging-s: got -1.0, wanted at least 0"),
        (["--max-bypass", "-1"], "--max-bypass: got -1, wanted at least 0"),
        (["--host-kv-bytes", "-1"], "--host-kv-bytes: got '-1', wanted a number of bytes"),
        (["--reserved-decode-tokens", "-1"], "--reserved-decode-tokens: got -1, wanted at least 0"),
        (["--safety-margin", "-0.01"], "--safety-margin: got -0.01, wanted at least 0"),
        (["--safety-margin", "0.91"], "--safety-margin: got 0.91, wanted at most 0.9"),
        (["--dead-after-s", "0.3"], "--dead-after-s: got 0.3, wanted at least twice --heartbeat-s = 0.25"),
        (["--lease-s", "0.3"], "--lease-s: got 0.3, wanted at least twice --heartbeat-s = 0.25"),
        (["--heartbeat-s", "6", "--dead-after-s", "12"], "--lease-s: got 10.0, wanted at least twice --heartbeat-s = 6"),
        (["--role", "decode", "--local-prefill", "never"], "wanted a way to prefill: give --prefill or --router"),
        (["--num-prefill", "0", "--local-prefill", "never"], "--num-prefill: got 0, wanted at least 1 with --local-prefill"),
        (["--schedule-log", "no/such/log"], "--schedule-log: got 'no/such/log', wanted a file in a directory that exists"),
        (["--num-pages", f"{2**55}"], f"--num-pages: got {2**55}, wanted at most 1e+09"),
        (["--kv-cache-bytes", "1048576TiB"], f"--kv-cache-bytes: got {2**60}, wanted at most 1e+18"),
        (["--kv-events-buffer", f"{2**63}"], f"--kv-events-buffer: got {2**63}, wanted at most 1e+09"),
        (["--transfer-chunk-tokens", f"{2**63}"], f"--transfer-chunk-tokens: got {2**63}, wanted at most 1.67772e+07"),
        (["--dead-after-s", "1e308"], "--dead-after-s: got 1e+308, wanted at most 1e+09"),
        (["--config", "no/such.toml"], "--config: cannot read 'no/such.toml': No such file or directory"),
    ],
)
def test_a_bad_flag_says_what_it_got_and_what_to_change(argv: list[str], wanted: str) -> None:
    assert wanted in message(*argv)


def test_who_decodes_nothing_needs_no_step_for_all_its_slots() -> None:
    assert load("--role", "prefill", "--max-num-batched-tokens", "4").scheduler.max_num_batched_tokens == 4


def test_bytes_of_the_command_line_that_are_no_text_are_refused() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert "--served-model-name: got 'caf\\udce9', wanted text in UTF-8" in message("--served-model-name", name)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[cache]\npge_size = 3\n", "[cache] pge_size: unknown key; did you mean page_size?"),
        ("[cache]\nmax_num_seqs = 3\n", "[cache] max_num_seqs: this key belongs to [scheduler]; move it there"),
        ("[cahce]\npage_size = 3\n", "cahce: unknown key; did you mean cache?"),
        ("pge_size = 3\n", "pge_size: unknown key; did you mean page_size?"),
        ("[router]\nport = 3\n", '[router]: no such section; a file is of one role, as in role = "router" above all sections'),
        ("[decode]\nport = 3\n", '[decode]: no such section; a file is of one role, as in role = "decode" above all sections'),
        ("port = {a = 3}\n", "[port]: no such section; there are model, cache, scheduler, transfer, device, server, local"),
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


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5"])
@pytest.mark.parametrize("flag", ["--page-size", "--kv-cache-bytes", "--devices", "--local-prefill"])
def test_a_number_beyond_all_bounds_is_named(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: got "):
        load(flag, f"below-tokens={text}" if flag == "--local-prefill" else text)


def test_a_step_has_no_more_tokens_than_memory_for_their_ids() -> None:
    assert load("--max-num-batched-tokens", str(2**24)).scheduler.max_num_batched_tokens == 2**24
    assert message("--max-num-batched-tokens", str(2**24 + 1)).startswith("--max-num-batched-tokens: got ")


def test_settings_import_neither_jax_nor_numpy_nor_grpc() -> None:
    modules = "jdisagg.core.settings, jdisagg.core.metrics, jdisagg.core.logs"
    code = f"import sys, {modules}; print([m for m in ('jax', 'numpy', 'grpc') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "[]"
