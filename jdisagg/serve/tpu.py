"""Which chips of a TPU host a worker takes. Settled before jax is imported: libtpu takes every chip that it is shown, and a
chip serves one process.

    --devices 4-7 on a host of eight -> claim_chips -> libtpu is shown chips 4 to 7, jax counts them 0 to 3
    --role local                     -> share_chips -> --devices of each worker, no chip twice
    the whole host, or no --devices  -> nothing is said: libtpu takes all there is

The variables are those of jax's own tests with several processes on one host (jax/_src/test_multiprocess.py), and so are the
bounds of one, two and four chips. The port is where processes of one slice would meet, and has to differ between worlds.

jax asks an installed libtpu for devices whatever the machine is. What becomes of that where there is no TPU: `quiet_libtpu`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.values import parse_ranges

PCI, DEV = Path("/sys/bus/pci/devices"), Path("/dev")
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}  # chips of a process -> their block
_USERS_CHOICE = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_VISIBLE_DEVICE_PATHS")
_GOOGLE = "0x1ae0"
_DEVICES_PER_CHIP = {  # by PCI device id, as in jax/_src/hardware_utils.py
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 2,  # tpu7x
}
_FIRST_PORT = 8476
_DEVICE_FILES = ("accel*", "vfio")  # of /dev: chips are reached through one or the other
_ANSWERS = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuHost:
    """The TPU of this machine."""

    num_chips: int
    devices_per_chip: int  # as jax counts


def find_tpu(environ: Mapping[str, str], pci: Path = PCI) -> TpuHost | None:
    """The chips that jax will want to use: None where there are none, or `JAX_PLATFORMS` names others only."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    cards = [path.parent for path in pci.glob("*.0/vendor") if _read(path) == _GOOGLE]  # .1 and on are others of its functions
    chips = [_DEVICES_PER_CHIP[card] for card in (_read(place / "device") for place in cards) if card in _DEVICES_PER_CHIP]
    return TpuHost(num_chips=len(chips), devices_per_chip=chips[0]) if chips else None


def may_have_tpu(pci: Path = PCI, dev: Path = DEV) -> bool:
    """False only where there is neither a card of Google's nor a device file through which a chip could be reached."""
    has_card = any(_read(vendor) == _GOOGLE for vendor in pci.glob("*/vendor"))
    return has_card or any(any(dev.glob(name)) for name in _DEVICE_FILES)


def quiet_libtpu(environ: MutableMapping[str, str], pci: Path = PCI, dev: Path = DEV) -> None:
    """On a machine that has no TPU, answer what libtpu would ask of its host and of a metadata server before it finds that out:
    without, it writes errors past our log that look like a failed start. Any answer will do; what the user has set stays."""
    if not may_have_tpu(pci, dev):
        for name, value in _ANSWERS.items():
            environ.setdefault(name, value)


def claim_chips(config: Config, environ: MutableMapping[str, str], tpu: TpuHost | None) -> Config:
    """Show libtpu the chips of `--devices` alone, where they are a part of the host's; returns the configuration with devices
    as jax will count them. A user who chose by a variable is left alone. Raises ConfigError for a number of
    chips that cannot be shown; whether those named form a block (1 to 4 of eight, say) only libtpu finds out."""
    wanted = config.device.devices
    if tpu is None or wanted is None or _chosen(environ) is not None:
        return config
    indices = parse_ranges(wanted, "--devices")
    chips = _chips(tpu, wanted)
    if len(chips) == tpu.num_chips:
        return config
    if len(chips) not in BOUNDS:
        larger = next((size for size in BOUNDS if size > len(chips)), tpu.num_chips)
        raise ConfigError(
            f"--devices: got {wanted!r}, which is {len(chips)} TPU chips, wanted 1, 2, 4 or all {tpu.num_chips}: libtpu shows "
            f"a process a block of them; give {larger} and use fewer of them (--tensor-parallel-size)"
        )
    port = str(_FIRST_PORT + chips[0])
    environ.update(
        {
            "TPU_VISIBLE_CHIPS": ",".join(map(str, chips)),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[len(chips)],
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_PORT": port,
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "CLOUD_TPU_TASK_ID": "0",
        }
    )
    per_chip = tpu.devices_per_chip
    shown = [chips.index(index // per_chip) * per_chip + index % per_chip for index in indices]
    return replace(config, device=replace(config.device, devices=",".join(map(str, shown))))


def share_chips(tpu: TpuHost, devices: str | None, needs: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """`--devices` of workers that need so many devices each, out of the host's or those named; no two share a chip, and blocks
    are aligned, as far as the chips named are. Raises ConfigError when there are too few."""
    if (variable := _chosen(environ)) is not None:
        raise ConfigError(
            f"{variable} is set, and every worker of this fleet would see the same chips; unset it and give --devices"
        )
    chips = list(range(tpu.num_chips)) if devices is None else _chips(tpu, devices)
    sizes = [_block(tpu, need) for need in needs]
    if sum(sizes) > len(chips):
        raise ConfigError(
            f"--prefill-tp: the workers want {sum(sizes)} TPU chips, and there are {len(chips)}; a chip serves one process: "
            "lower --prefill-tp, --decode-tp or the number of workers, or give --role colocated, which is one process"
        )
    shares, first = [""] * len(sizes), 0
    for worker in sorted(range(len(sizes)), key=lambda worker: -sizes[worker]):
        block = chips[first : first + sizes[worker]]
        per_chip = tpu.devices_per_chip
        shares[worker] = ",".join(str(chip * per_chip + index) for chip in block for index in range(per_chip))
        first += sizes[worker]
    return shares


def _chips(tpu: TpuHost, devices: str) -> list[int]:
    """The chips that hold these devices, ascending. Raises ConfigError for devices that do not exist."""
    indices, num_devices = parse_ranges(devices, "--devices"), tpu.num_chips * tpu.devices_per_chip
    if max(indices) >= num_devices:
        raise ConfigError(
            f"--devices: got {devices!r}, wanted indices below {num_devices}: this machine has {tpu.num_chips} TPU chips"
        )
    return sorted({index // tpu.devices_per_chip for index in indices})


def _block(tpu: TpuHost, num_devices: int) -> int:
    """Chips of the smallest block that holds so many devices; more than there are when none does."""
    chips = -(-num_devices // tpu.devices_per_chip)
    return next((size for size in (*BOUNDS, tpu.num_chips) if size >= chips), chips)


def _chosen(environ: Mapping[str, str]) -> str | None:
    """The variable by which the user chose chips."""
    return next((name for name in _USERS_CHOICE if environ.get(name)), None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a card that was taken out meanwhile
        return ""
