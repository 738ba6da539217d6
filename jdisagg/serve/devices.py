"""The devices of a worker: those that jax has, and what is wrong with them in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.values import parse_ranges
from jdisagg.serve.tpu import BOUNDS, TpuHost, find_tpu

CPUINFO = Path("/proc/cpuinfo")
_PLUGINS = {  # by name in JAX_PLATFORMS: packages of which one is needed, and what scripts/setup.sh calls them
    "cuda": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "cuda13"),
    "tpu": (("libtpu",), "tpu"),
}


def usable_devices(config: Config) -> list[Any]:
    """`--devices` of the default backend, or all of them. Raises ConfigError when there are none, or not those."""
    tpu = find_tpu(os.environ)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second, with nothing said, where a GPU plugin finds no GPU
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if missing := _missing_plugin(platforms):
            raise ConfigError(f"--devices: jax cannot start: {missing}") from error
        advice = (
            "" if tpu is None else "; a TPU chip serves one process: give each its own, such as --devices 0 and --devices 1"
        )
        reason = str(error) or f"it sees no device of JAX_PLATFORMS={platforms}: look for its driver, or into the container"
        raise ConfigError(f"--devices: jax cannot start: {reason}{advice}") from error
    chosen = choose_devices(devices, config.device.devices, num_processes=jax.process_count(), tpu=tpu)
    if sys.platform == "linux" and chosen[0].platform == "cpu":
        check_processor(CPUINFO)
    return chosen


def _missing_plugin(platforms: str) -> str:
    """Which of jax's packages for `platforms` is not installed, and what brings it; "" = they all are."""
    for platform in platforms.split(","):
        packages, accelerator = _PLUGINS.get(platform, ((), ""))
        by_path = platform == "tpu" and os.environ.get("TPU_LIBRARY_PATH")  # as jax looks for it first
        if packages and not by_path and all(find_spec(package) is None for package in packages):
            return (
                f"JAX_PLATFORMS={platforms} needs {packages[0]}, which is not installed: "
                f"scripts/setup.sh --accelerator {accelerator} brings it"
            )
    return ""


def check_processor(cpuinfo: Path) -> None:
    """Raise ConfigError where Linux hides what its processor is: XLA:CPU would start, and fail in the first step (YNNPACK,
    "unsupported parameter")."""
    try:
        why = "" if cpuinfo.read_bytes().strip() else "it is empty"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(
            f"--devices: jax cannot compute on this CPU without {cpuinfo}: {why}; mount all of /proc (of systemd's settings: "
            "ProcSubset=all)"
        )


def choose_devices(devices: Sequence[Any], wanted: str | None, *, num_processes: int, tpu: TpuHost | None) -> list[Any]:
    """`wanted` of `devices`. Raises ConfigError for one that is not there, for a TPU that would stand idle, and for a slice
    over several hosts, of whose devices most are out of this process's reach."""
    if num_processes > 1:
        block = BOUNDS.get(tpu.num_chips if tpu else 4, "2,4,1")
        chips = ",".join(map(str, range(tpu.num_chips if tpu else 4)))
        raise ConfigError(
            f"--devices: this is one of {num_processes} processes of a slice over several hosts, and a worker runs on one; "
            "make each host a slice of its own, by its environment: TPU_PROCESS_BOUNDS=1,1,1 "
            f"TPU_CHIPS_PER_PROCESS_BOUNDS={block} TPU_VISIBLE_CHIPS={chips}"
        )
    if tpu is not None and devices[0].platform == "cpu":
        raise ConfigError(
            f"--devices: this machine has {tpu.num_chips} TPU chips, and jax would compute on its CPU: install libtpu "
            "(scripts/setup.sh --accelerator tpu), or set JAX_PLATFORMS=cpu if that is meant"
        )
    if wanted is None:
        return list(devices)
    indices = parse_ranges(wanted, "--devices")
    if max(indices) >= len(devices):
        raise ConfigError(
            f"--devices: got {wanted!r}, wanted indices below {len(devices)}: jax has {len(devices)} devices "
            f"({devices[0].platform})"
        )
    return [devices[index] for index in indices]
