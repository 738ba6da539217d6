"""What a flag or a key of another role gets: refused where it was typed for this one, remarked where a file is shared."""

import pytest

from jdisagg.core.flags import BY_NAME, FLAGS, ROLES
from tests.unit.core.loading import load, message

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
    load("--role", "router", "--model", "demo", "--port", "1", "--heartbeat-s", "0.5")
    load("--role", "router", "--tool-call-parser", "hermes", "--reasoning-parser", "none")
    assert not caplog.records
    load("--role", "router", "--page-size", "32", "--dtype", "float32")
    assert [record.message for record in caplog.records] == ["--page-size, --dtype: means nothing to --role router, ignored"]
    caplog.clear()
    load("--role", "prefill", "--tool-call-parser", "hermes", "--reasoning-parser", "none")
    [record] = caplog.records
    assert record.message == "--tool-call-parser, --reasoning-parser: means nothing to --role prefill, ignored"
