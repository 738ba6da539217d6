"""Settings as they are printed and handed to children: what is read back is the same Config."""

from dataclasses import replace
from tempfile import NamedTemporaryFile

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.config import Config
from jdisagg.core.flags import BY_NAME, FLAGS, SECTIONS, applies
from jdisagg.core.printed import to_flags, to_toml
from jdisagg.core.settings import build_parser
from tests.unit.core.loading import load

argv_strategy = st.fixed_dictionaries(
    {},
    optional={
        "--role": st.sampled_from(["unified", "prefill", "decode", "router"]),
        "--model": st.sampled_from(["demo", 'a dir/with "quotes" and é', "beyond 16 bits: 🙂", "not printable: \x7f"]),
        "--page-size": st.integers(1, 1024).map(str),
        "--num-pages": st.integers(2, 10**9).map(str),
        "--prefill": st.lists(st.integers(1, 65535), unique=True, max_size=3).map(lambda p: ",".join(f"h:{x}" for x in p)),
        "--local-prefill": st.sampled_from(["on-failure", "below-tokens=0", "below-tokens=77"]),
        "--lease-s": st.floats(0.5, 1e6).map(str),
        "--layer-loop": st.sampled_from(["auto", "unrolled", "scan"]),
        "--devices": st.sampled_from(["0", "0-3,7"]),
    },
)


def test_children_get_only_flags_that_mean_something_to_them() -> None:
    config = load("--role", "local", "--local-prefill", "never", "--page-size", "32", "--num-prefill", "2", "--prefill-tp", "2")
    roles = {role: " ".join(to_flags(replace(config, role=role))) for role in ("router", "prefill", "decode")}
    assert roles == {
        "router": "--role router",
        "prefill": "--role prefill --page-size=32",
        "decode": "--role decode --page-size=32 --local-prefill=never",
    }


def test_a_value_that_begins_with_a_dash_reaches_a_child() -> None:
    with NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write('model = "-odd"')
        file.flush()
        config = load("--role", "unified", "--config", file.name)
    assert load(*to_flags(config)).model == config.model


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


def test_what_is_not_set_is_named_beside_what_is() -> None:
    text = to_toml(load("--role", "decode", "--advertise-host", "d0"))
    assert 'advertise_host = "d0"' in text
    assert "# advertise_host" not in text
    for section, name in (("[server]", "advertise_port"), ("[cache]", "num_pages")):
        _, _, behind = text.partition(f"{section}\n")
        assert f"# {name} is not set\n" in behind.partition("\n[")[0]
    named = [line.split(" ")[1 if line.startswith("# ") else 0] for line in text.splitlines()[1:] if line[:1] not in ("", "[")]
    assert sorted(named) == sorted(flag.name for flag in FLAGS if flag.name not in ("print_config", "role", "config"))


def test_every_section_is_printed_in_order() -> None:
    printed = [line[1:-1] for line in to_toml(Config()).splitlines() if line.startswith("[")]
    assert tuple(printed) == SECTIONS


def test_help_names_the_flag_that_is_no_setting() -> None:
    """`serve --version` is answered before settings are read."""
    assert "--version" in build_parser().format_help()
