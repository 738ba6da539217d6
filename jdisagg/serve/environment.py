"""What a process must settle before jax is imported: cores, devices, descriptors, compile cache, and whose life it shares."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from jdisagg.core.config import Config, DeviceConfig
from jdisagg.core.errors import ConfigError
from jdisagg.core.values import parse_ranges
from jdisagg.serve.compile_cache import drop_broken_entries, usable_cache_dir
from jdisagg.serve.cores import CGROUPS, cpu_quota, usable_cores
from jdisagg.serve.tpu import quiet_libtpu

log = logging.getLogger(__name__)

PARENT_VARIABLE = "JDISAGG_PARENT_PID"  # set by a supervisor that holds the write end of our stdin
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
ALLOCATOR_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
KEPT_BYTES = 2**30
_LEAST_THRESHOLD_BYTES = 2**25  # what older versions of glibc take at most
_LEAST_ARENAS = 8
GRPC_LOG_VARIABLE = "GRPC_VERBOSITY"  # https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
THREADS_VARIABLE = "NPROC"  # what XLA:CPU reads for the size of its thread pool instead of counting cores
_THREADS_PER_DEVICE = 2
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def pin_to_cores(device: DeviceConfig) -> None:
    """Restrict this process to `--cpu-affinity`. Raises ConfigError for cores that do not exist here."""
    if device.cpu_affinity is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu-affinity: this operating system cannot pin processes; leave the flag out")
    wanted, usable = parse_ranges(device.cpu_affinity, "--cpu-affinity"), os.sched_getaffinity(0)
    with suppress(OSError):  # it has none of them
        os.sched_setaffinity(0, wanted)
    if os.sched_getaffinity(0) != set(wanted):  # of some that there are not the kernel says nothing
        cores = ",".join(map(str, sorted(usable)))
        raise ConfigError(f"--cpu-affinity: got {device.cpu_affinity!r}, wanted cores out of {cores}")


def num_devices_needed(config: Config) -> int:
    """Devices that must be visible for this role's mesh(es)."""
    both = config.prefill_tp + config.decode_tp
    needed = both if config.role == "colocated" else config.model.tensor_parallel_size
    if config.device.devices is not None:
        needed = max(needed, 1 + max(parse_ranges(config.device.devices, "--devices")))
    return needed


def num_threads(num_devices: int, cgroups: Path = CGROUPS) -> int:
    """Threads that XLA:CPU needs for so many devices of one process, at least one for each core that it may keep busy."""
    return max(usable_cores(cgroups), _THREADS_PER_DEVICE * num_devices)


def prepare_jax(config: Config, environ: MutableMapping[str, str], cgroups: Path = CGROUPS) -> None:
    """Set the variables jax reads at import. What the user has set in the environment stays, but flags win over it.

    XLA:CPU counts the cores that this process may run on, and knows of no quota of a container. Virtual CPU devices appear when
    the role needs several (accelerators ignore the setting), with threads for all of them: one that waits in a collective holds
    its thread, and on two cores what it waits for may never get one. Memory is not preallocated: the KV pool is sized
    explicitly, and two workers may share one device. A libtpu that finds no TPU says nothing.
    """
    quiet_libtpu(environ)
    needed = num_devices_needed(config)
    if needed > 1 and DEVICE_COUNT_FLAG not in environ.get("XLA_FLAGS", ""):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}={needed}".strip()
    if needed > 1 or cpu_quota(cgroups) is not None:
        environ.setdefault(THREADS_VARIABLE, str(num_threads(needed, cgroups)))
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    chosen = config.device.compilation_cache_dir
    if chosen == "off":
        environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        return
    if chosen is not None or "JAX_COMPILATION_CACHE_DIR" not in environ:
        environ["JAX_COMPILATION_CACHE_DIR"] = str(usable_cache_dir(chosen))
    if directory := environ["JAX_COMPILATION_CACHE_DIR"]:  # empty: jax keeps nothing
        drop_broken_entries(Path(directory))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have glibc use again what was freed, also in large blocks: up to KEPT_BYTES, and 64 MiB for each core; returns whether it
    does.

    By itself it maps and unmaps every block of 32 MiB and more, and the kernel clears it page by page, which takes as long as
    receiving a piece into it. Whoever chose otherwise in the environment is left alone; other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in ALLOCATOR_VARIABLES):
        return False
    mallopt(_M_ARENA_MAX, max(_LEAST_ARENAS, usable_cores()))  # by itself eight for each core, and each keeps up to 64 MiB
    large = mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _LEAST_THRESHOLD_BYTES)
    return bool(large and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def quiet_grpc(environ: MutableMapping[str, str]) -> None:
    """Have gRPC, which writes past our log and in a form of its own, write errors alone: by itself it also has a line for every
    connection that the other side ends. Before it is imported; what the user has set stays."""
    environ.setdefault(GRPC_LOG_VARIABLE, "ERROR")


def open_standard_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, as some starters leave them: sockets would get their numbers, and
    libuv ends the process when one of those is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def allow_descriptors() -> None:
    """As many as this process may have: shells and service managers grant a thousand or so, and each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a limit that is none, or beyond what the kernel takes: ours stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("descriptors: %d, now %d", soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def check_descriptors(number: int) -> None:
    """Raises OSError where this process gets no `number` of them now."""
    taken: list[int] = []
    try:
        while len(taken) < number:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)


def die_with_parent(environ: Mapping[str, str]) -> None:
    """When started by a supervisor, end at once if it goes away, however it dies; a Ctrl-C in the terminal reaches it alone.

    It stays in its session: Linux shares cores between sessions first, and starves threads where cores are short. On Linux the
    kernel kills this process; everywhere a thread also watches stdin, whose write end only the supervisor holds.
    """
    if PARENT_VARIABLE not in environ:
        return
    parent = int(environ[PARENT_VARIABLE])
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    threading.Thread(target=_exit_at_end_of_stdin, name="parent-watch", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)
