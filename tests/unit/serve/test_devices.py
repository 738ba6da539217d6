"""What a worker makes of the devices that jax has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import load_config
from jdisagg.serve import devices as serve_devices
from jdisagg.serve.devices import check_processor, choose_devices
from jdisagg.serve.tpu import TpuHost

ROOT = Path(__file__).parents[3]
V6E_8 = TpuHost(num_chips=8, devices_per_chip=1)


def devices(platform: str, count: int) -> list[Any]:
    return [SimpleNamespace(platform=platform, id=index) for index in range(count)]


def test_devices_are_those_named_in_that_order_or_all() -> None:
    four = devices("tpu", 4)
    assert choose_devices(four, "2,0", num_processes=1, tpu=V6E_8) == [four[2], four[0]]
    assert choose_devices(four, None, num_processes=1, tpu=V6E_8) == four


def test_a_device_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"--devices: got '0-7', wanted indices below 4: jax has 4 devices \(gpu\)"):
        choose_devices(devices("gpu", 4), "0-7", num_processes=1, tpu=None)


def test_a_tpu_host_does_not_serve_from_its_cpu_unnoticed() -> None:
    with pytest.raises(ConfigError, match=r"8 TPU chips, .* CPU: .*--accelerator tpu.* JAX_PLATFORMS=cpu"):
        choose_devices(devices("cpu", 1), None, num_processes=1, tpu=V6E_8)
    assert choose_devices(devices("cpu", 1), None, num_processes=1, tpu=None)


def test_a_worker_over_several_hosts_is_refused_with_what_makes_one_of_each() -> None:
    wanted = r"one of 2 processes .* TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_VISIBLE_CHIPS=0,1,2,3"
    with pytest.raises(ConfigError, match=wanted):
        choose_devices(devices("tpu", 8), None, num_processes=2, tpu=TpuHost(num_chips=4, devices_per_chip=1))


def test_a_backend_that_does_not_start_is_one_line_that_says_what_to_change() -> None:
    environ = {**os.environ, "JAX_PLATFORMS": "no-such-platform", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jdisagg.serve", "--role", "prefill", "--compilation-cache-dir", "off"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "jdisagg.serve: " in line]
    assert "no-such-platform" in line
    assert "--devices" in line
    assert "Traceback" not in done.stderr


def test_a_gpu_that_jax_does_not_see_is_one_line_that_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which its plugin says nothing at all, such as in a container that was given none."""

    def find_none() -> None:
        raise AssertionError

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(serve_devices.jax, "devices", find_none)
    monkeypatch.setattr(serve_devices, "find_spec", lambda package: object() if package == "jax_cuda12_plugin" else None)
    with pytest.raises(ConfigError, match=r"--devices: jax cannot start: it sees no device of JAX_PLATFORMS=cuda: .* driver"):
        serve_devices.usable_devices(load_config(["--role", "unified"]))


@pytest.mark.parametrize(
    ("platforms", "package", "accelerator"),
    [("cuda", "jax_cuda13_plugin", "cuda13"), ("cuda,cpu", "jax_cuda13_plugin", "cuda13"), ("tpu", "libtpu", "tpu")],
)
def test_a_platform_whose_package_is_not_installed_is_one_line_that_says_what_brings_it(
    platforms: str, package: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Unable to initialize backend (set JAX_PLATFORMS='' to automatically choose an available backend)")

    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(serve_devices.jax, "devices", refuse)
    monkeypatch.setattr(serve_devices, "find_tpu", lambda _: V6E_8)
    monkeypatch.setattr(serve_devices, "find_spec", lambda _: None)
    told = (
        f"--devices: jax cannot start: JAX_PLATFORMS={platforms} needs {package}, which is not installed: "
        f"scripts/setup.sh --accelerator {accelerator} brings it"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        serve_devices.usable_devices(load_config(["--role", "unified"]))


@pytest.mark.parametrize(("platforms", "library"), [("tpu", "/srv/libtpu.so"), ("rocm", ""), ("", "")])
def test_what_jax_says_stands_where_no_package_of_ours_is_missing(
    platforms: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a libtpu that is named by its path."""

    def refuse() -> None:
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("TPU_LIBRARY_PATH", library)
    monkeypatch.setattr(serve_devices.jax, "devices", refuse)
    monkeypatch.setattr(serve_devices, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Unable to initialize backend"):
        serve_devices.usable_devices(load_config(["--role", "unified"]))


def test_a_processor_that_is_hidden_is_one_line_that_says_what_to_change(tmp_path: Path) -> None:
    hidden = tmp_path / "cpuinfo"
    with pytest.raises(ConfigError, match=r"--devices: .*cpuinfo: No such file or directory; mount all of /proc .*ProcSubset"):
        check_processor(hidden)
    hidden.touch()
    with pytest.raises(ConfigError, match="it is empty; mount all of /proc"):
        check_processor(hidden)
    hidden.write_text("processor\t: 0\n")
    check_processor(hidden)
