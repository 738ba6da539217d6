"""What is settled before jax is imported."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jdisagg.core.config import Config, DeviceConfig, LocalConfig, ModelConfig
from jdisagg.core.errors import ConfigError
from jdisagg.serve.environment import num_devices_needed, pin_to_cores, prepare_jax

COUNT = "--xla_force_host_platform_device_count"


def config(tp: int = 1, devices: str | None = None, cache: str | None = "off", role: str = "unified") -> Config:
    return Config(
        role=role,
        model=ModelConfig(tensor_parallel_size=tp),
        device=DeviceConfig(devices=devices, compilation_cache_dir=cache),
        local=LocalConfig(prefill_tp=2, decode_tp=3),
    )


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (config(), 1),
        (config(tp=4), 4),
        (config(devices="6"), 7),
        (config(tp=2, devices="2-3"), 4),
        (config(role="colocated"), 5),
    ],
)
def test_as_many_virtual_cpu_devices_as_the_role_needs(made: Config, wanted: int) -> None:
    environ = {"XLA_FLAGS": "--other"}
    prepare_jax(made, environ)
    assert num_devices_needed(made) == wanted
    assert environ["XLA_FLAGS"] == ("--other" if wanted == 1 else f"--other {COUNT}={wanted}")


def test_a_device_count_of_the_user_stays() -> None:
    environ = {"XLA_FLAGS": f"{COUNT}=8"}
    prepare_jax(config(tp=2), environ)
    assert environ["XLA_FLAGS"] == f"{COUNT}=8"


@pytest.mark.parametrize(("wanted", "is_pinned"), [("0-1", True), ("1", True), ("0-3", False), ("1,9", False), ("9", False)])
def test_cores_that_are_not_all_there_are_refused(wanted: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel has it: of four that are asked for it takes the two that there are, without a word."""
    cores = {0, 1}

    def pin(pid: int, asked: tuple[int, ...]) -> None:
        if not (found := {0, 1} & set(asked)):
            raise OSError
        cores.intersection_update(found)

    monkeypatch.setattr(os, "sched_setaffinity", pin)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    if is_pinned:
        pin_to_cores(DeviceConfig(cpu_affinity=wanted))
        return
    with pytest.raises(ConfigError, match=f"--cpu-affinity: got '{wanted}', wanted cores out of 0,1$"):
        pin_to_cores(DeviceConfig(cpu_affinity=wanted))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, str], Path]:
    """One of 128 cores, of which this process may run on some, and whose container has a quota."""

    def made(cores: int, quota: str) -> Path:
        monkeypatch.setattr(os, "cpu_count", lambda: 128)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        return tmp_path

    return made


@pytest.mark.parametrize(
    ("cores", "quota", "tp", "wanted"),
    [
        (2, "max", 1, None),
        (2, "max", 4, "8"),
        (64, "max", 4, "64"),
        (64, "400000", 1, "4"),
        (64, "50000", 1, "2"),
        (64, "150000", 4, "8"),
        (2, "400000", 1, "2"),
    ],
)
def test_threads_are_as_many_as_cores_to_run_them_and_enough_for_devices_that_wait_for_one_another(
    machine: Callable[[int, str], Path], cores: int, quota: str, tp: int, wanted: str | None
) -> None:
    environ: dict[str, str] = {}
    prepare_jax(config(tp=tp), environ, machine(cores, quota))
    assert environ.get("NPROC") == wanted
    chosen = {"NPROC": "3"}
    prepare_jax(config(tp=tp), chosen, machine(cores, quota))
    assert chosen["NPROC"] == "3"


def test_the_compilation_cache_is_a_directory_that_exists(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    prepare_jax(config(cache=str(tmp_path / "a/b")), environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()


def test_the_flag_wins_over_the_environment_and_off_removes_it(tmp_path: Path) -> None:
    environ = {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    prepare_jax(config(cache=None), environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    prepare_jax(config(cache=str(tmp_path)), environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path)
    prepare_jax(config(cache="off"), environ)
    assert "JAX_COMPILATION_CACHE_DIR" not in environ


def test_an_unusable_cache_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--compilation-cache-dir: .* is not writable .* name another directory, or 'off'"):
        prepare_jax(config(cache=str(tmp_path / "file" / "dir")), {})


def test_the_cache_is_in_the_working_directory_of_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # as in a container that runs as any number
    monkeypatch.chdir(tmp_path)
    environ: dict[str, str] = {}
    prepare_jax(config(cache=None), environ)
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".jdisagg-cache/xla")


TAKE_TWICE = """
import ctypes, resource, sys
from jdisagg.serve.environment import keep_freed_memory
print(keep_freed_memory(dict.fromkeys(sys.argv[1:], "1")))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 * 2**20)
    ctypes.memset(block, 1, 64 * 2**20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
@pytest.mark.parametrize(("chosen", "kept"), [((), True), (("MALLOC_TRIM_THRESHOLD_",), False), (("GLIBC_TUNABLES",), False)])
def test_a_large_block_is_cleared_by_the_kernel_once_unless_the_user_chose_otherwise(
    chosen: tuple[str, ...], kept: bool
) -> None:
    command = [sys.executable, "-c", TAKE_TWICE, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said, faults = done.stdout.split()
    assert said == str(kept)
    assert (int(faults) < 16) == kept


def test_a_process_may_open_as_many_descriptors_as_the_system_lets_it() -> None:
    code = (
        "import resource as r; from jdisagg.serve.environment import allow_descriptors\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 512)); allow_descriptors(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("(512, 512)\n", "")


TURNED_AWAY = """
import os, threading
from jdisagg.serve.environment import quiet_grpc

quiet_grpc(os.environ)
from concurrent import futures
import grpc

server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.http2.min_ping_interval_without_data_ms", 300_000)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
pings = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0)]
channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=pings)
lost, was_ready = threading.Event(), threading.Event()

def changed(state):
    if state is grpc.ChannelConnectivity.READY:
        was_ready.set()
    elif was_ready.is_set():
        lost.set()

channel.subscribe(changed, try_to_connect=True)
assert lost.wait(100.0), "it is not turned away"
"""


@pytest.mark.parametrize(("verbosity", "is_told"), [(None, False), ("INFO", True)])
def test_that_a_server_ends_a_connection_is_no_line_of_grpc_s_own_unless_the_user_wants_it(
    verbosity: str | None, is_told: bool
) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    environ |= {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    command = [sys.executable, "-c", TURNED_AWAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environ)
    assert ("Got goaway" in done.stderr) == is_told, done.stderr
    assert "GOAWAY with error code" in done.stderr, "errors are told in any case"


def test_grpc_is_not_imported_before_it_is_told_to_be_quiet() -> None:
    """It reads the variable at its import."""
    code = "import sys, jdisagg.serve.__main__; print('grpc' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True)
    assert told.stdout == "False\n"
