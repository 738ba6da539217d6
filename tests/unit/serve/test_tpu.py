"""Chips of a TPU host: found without jax, shown to libtpu, shared out between workers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jdisagg.core.config import Config, DeviceConfig, LocalConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import load_config
from jdisagg.serve.local import worker_specs
from jdisagg.serve.tpu import TpuHost, claim_chips, find_tpu, may_have_tpu, quiet_libtpu, share_chips

V6E_8 = TpuHost(num_chips=8, devices_per_chip=1)
TPU7X_4 = TpuHost(num_chips=4, devices_per_chip=2)
GOOGLE, V6E, TPU7X, NETWORK_CARD = "0x1ae0", "0x006f", "0x0076", "0x0042"


def pci(directory: Path, *cards: tuple[str, str], functions: int = 1) -> Path:
    """A machine with these cards, as Linux shows them, of so many functions each."""
    for number, (vendor, device) in enumerate(cards * functions):
        place = directory / f"0000:00:{number % len(cards):02x}.{number // len(cards)}"
        place.mkdir()
        (place / "vendor").write_text(vendor + "\n")
        (place / "device").write_text(device + "\n")
    return directory


def wanting(devices: str | None, role: str = "decode") -> Config:
    return Config(role=role, device=DeviceConfig(devices=devices))


def test_chips_are_counted_and_cards_that_are_none_are_not(tmp_path: Path) -> None:
    cards = [(GOOGLE, NETWORK_CARD), *[(GOOGLE, V6E)] * 8, ("0x10de", V6E)]
    assert find_tpu({}, pci(tmp_path, *cards)) == V6E_8


def test_a_chip_that_shows_itself_as_several_functions_is_one(tmp_path: Path) -> None:
    assert find_tpu({}, pci(tmp_path, *[(GOOGLE, V6E)] * 8, functions=2)) == V6E_8


def test_jax_sees_two_devices_in_a_chip_of_tpu7x(tmp_path: Path) -> None:
    assert find_tpu({}, pci(tmp_path, *[(GOOGLE, TPU7X)] * 4)) == TPU7X_4


def test_a_machine_without_chips_or_pci_has_no_tpu(tmp_path: Path) -> None:
    assert find_tpu({}, pci(tmp_path, (GOOGLE, NETWORK_CARD))) is None
    assert find_tpu({}, tmp_path / "none") is None


@pytest.mark.parametrize(("platforms", "found"), [("cpu", False), ("cuda,cpu", False), ("", True), ("tpu,cpu", True)])
def test_chips_that_jax_was_told_to_leave_alone_are_left_alone(tmp_path: Path, platforms: str, found: bool) -> None:
    assert (find_tpu({"JAX_PLATFORMS": platforms}, pci(tmp_path, (GOOGLE, V6E))) is not None) == found


def test_libtpu_is_answered_where_there_is_no_tpu_and_what_the_user_says_stays(tmp_path: Path) -> None:
    environ = {"TPU_ACCELERATOR_TYPE": "v6e-1"}
    quiet_libtpu(environ, tmp_path, tmp_path)
    assert environ == {"TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_WORKER_HOSTNAMES": "localhost"}


@pytest.mark.parametrize("there", ["accel0", "vfio/0", "v2 on PCI"])
def test_libtpu_finds_out_by_itself_where_there_may_be_a_tpu(tmp_path: Path, there: str) -> None:
    cards, dev = tmp_path / "pci", tmp_path / "dev"
    cards.mkdir()
    if there == "v2 on PCI":
        pci(cards, (GOOGLE, "0x0027"))  # of which we know nothing
    else:
        (dev / there).mkdir(parents=True)
    environ: dict[str, str] = {}
    quiet_libtpu(environ, cards, dev)
    assert environ == {}


STARTING = """
import os
from jdisagg.core.config import Config, DeviceConfig
from jdisagg.serve.environment import prepare_jax
prepare_jax(Config(role="unified", device=DeviceConfig(compilation_cache_dir="off")), os.environ)
import jax
jax.devices()
"""


@pytest.mark.skipif(find_spec("libtpu") is None or may_have_tpu(), reason="wants libtpu on a machine without a TPU")
def test_a_libtpu_that_finds_no_tpu_says_nothing() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU_")}
    done = subprocess.run(
        [sys.executable, "-c", STARTING], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("devices", "chips", "bounds", "port", "then"),
    [
        ("4-7", "4,5,6,7", "2,2,1", "8480", "0,1,2,3"),
        ("2,3", "2,3", "1,2,1", "8478", "0,1"),
        ("5", "5", "1,1,1", "8481", "0"),
    ],
)
def test_libtpu_is_shown_the_chips_of_a_worker_and_jax_counts_them_from_zero(
    devices: str, chips: str, bounds: str, port: str, then: str
) -> None:
    environ = {"TPU_PROCESS_BOUNDS": "1,1,2", "CLOUD_TPU_TASK_ID": "1"}  # of a slice over two hosts
    assert claim_chips(wanting(devices), environ, V6E_8) == wanting(then)
    assert environ == {
        "TPU_VISIBLE_CHIPS": chips,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": port,
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "CLOUD_TPU_TASK_ID": "0",
    }


def test_a_chip_of_two_devices_is_shown_whole() -> None:
    environ: dict[str, str] = {}
    assert claim_chips(wanting("5"), environ, TPU7X_4) == wanting("1")
    assert environ["TPU_VISIBLE_CHIPS"] == "2"


@pytest.mark.parametrize(
    ("config", "environ", "tpu"),
    [
        (wanting(None), {}, V6E_8),
        (wanting("0-7"), {}, V6E_8),  # the whole host: as libtpu would have it
        (wanting("0-3"), {"TPU_VISIBLE_CHIPS": "4,5,6,7"}, V6E_8),  # the user has chosen, and jax counts what is left
        (wanting("0-3"), {"TPU_VISIBLE_DEVICES": "4,5,6,7"}, V6E_8),
        (wanting("0-3"), {}, None),
    ],
)
def test_libtpu_is_left_alone_where_nobody_chose_a_part_of_a_host_or_the_user_did(
    config: Config, environ: dict[str, str], tpu: TpuHost | None
) -> None:
    before = dict(environ)
    assert claim_chips(config, environ, tpu) == config
    assert environ == before


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("6-9", r"--devices: got '6-9', wanted indices below 8: this machine has 8 TPU chips"),
        ("0-2", r"--devices: got '0-2', which is 3 TPU chips, wanted 1, 2, 4 or all 8: .*; give 4 and use fewer of them"),
    ],
)
def test_chips_that_libtpu_cannot_show_are_a_config_error(devices: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        claim_chips(wanting(devices), {}, V6E_8)


@pytest.mark.parametrize(
    ("tpu", "devices", "needs", "shares"),
    [
        (V6E_8, None, (4, 4), ["0,1,2,3", "4,5,6,7"]),
        (V6E_8, None, (1, 4), ["4", "0,1,2,3"]),  # the largest first: a block of four begins at a multiple of four
        (V6E_8, None, (1, 1, 2), ["2", "3", "0,1"]),
        (V6E_8, "4-7", (2, 2), ["4,5", "6,7"]),
        (V6E_8, None, (3, 1), ["0,1,2,3", "4"]),
        (TPU7X_4, None, (1, 2), ["0,1", "2,3"]),
    ],
)
def test_workers_of_one_host_get_chips_of_their_own(
    tpu: TpuHost, devices: str | None, needs: tuple[int, ...], shares: list[str]
) -> None:
    assert share_chips(tpu, devices, needs, {}) == shares


@pytest.mark.parametrize(
    ("devices", "needs", "environ", "message"),
    [
        (
            None,
            (8, 1),
            {},
            r"--prefill-tp: the workers want 9 TPU chips, and there are 8; a chip serves one process: .*colocated",
        ),
        ("0-3", (4, 1), {}, r"want 5 TPU chips, and there are 4"),
        (None, (1, 1), {"TPU_VISIBLE_CHIPS": "0"}, r"TPU_VISIBLE_CHIPS is set, .* unset it and give --devices"),
    ],
)
def test_workers_that_would_share_a_chip_are_a_config_error(
    devices: str | None, needs: tuple[int, ...], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        share_chips(V6E_8, devices, needs, environ)


def test_the_workers_of_a_local_fleet_are_told_which_chips_are_theirs() -> None:
    config = Config(local=LocalConfig(num_prefill=1, num_decode=1, prefill_tp=2, decode_tp=4))
    specs = worker_specs(config, "127.0.0.1:9", program=(), tpu=V6E_8)
    assert [load_config(spec.command(None), {}).device.devices for spec in specs] == ["4,5", "0,1,2,3"]


CLAIM = """
import sys
from jdisagg.serve import __main__ as serve
from jdisagg.serve.tpu import TpuHost
serve.find_tpu = lambda environ: TpuHost(num_chips=8, devices_per_chip=1)
sys.exit(serve.main(["--role", "prefill", "--devices", "4-9", "--compilation-cache-dir", "off"]))
"""


def test_a_worker_claims_its_chips_before_jax_starts() -> None:
    done = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, text=True, timeout=60, check=False)
    told = "jdisagg.serve: --devices: got '4-9', wanted indices below 8: this machine has 8 TPU chips\n"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith(told)
