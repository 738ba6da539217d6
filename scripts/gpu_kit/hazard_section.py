"""Section `hazards`: what is known to corrupt or hang on a CPU, tried on this device, and that the wrappers hold.

Nothing here is known to kill this process: states that do are unreachable through `TransferServers`, and are left alone. On a
device where nothing is known yet transfers may all the same, and come last.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from fleet_process import free_port

from gpu_kit.ending import with_our_pid
from gpu_kit.findings import Clock, Findings, Skipped
from gpu_kit.hazard_peer import HOST, Peer, peer, values
from gpu_kit.setting import Setting
from jdisagg.transfer.jax_server import TransferConnection, TransferServers, Unsupported
from jdisagg.transfer.target import PieceError

PULL_S = 30.0  # a machine may stand still for some of them
SHORT_S = 1.0  # a deadline that must fire
LATE_S = 20.0  # after it, on a busy machine; the library alone would wait for ever
COLD_SHARE = 0.6  # of the time there is; transfers come after it
SHAPE = (4, 32, 8, 128)


def run(setting: Setting, findings: Findings) -> None:
    """See Section."""
    with _cold(setting) as cold:
        for name, hazard in (("a gathered copy outlives its donated source", _donated), ("donation invalidates", _deleted)):
            findings.attempt(name, partial(hazard, name, findings))
        findings.attempt("an array that failed", partial(_error_array, findings))
        findings.attempt("two cold compilations", partial(_same_bits, cold, setting, findings))
    findings.attempt("transfer server", partial(_transfers, setting.clock, findings))


def _donated(name: str, findings: Findings) -> None:
    cache = jnp.arange(2**20, dtype=jnp.float32)
    wanted = np.arange(2**20, dtype=np.float32)[::4]
    gathered = jax.jit(lambda x: x[::4] + 0)(cache)
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for _ in range(8):
        cache = step(cache)
    findings.check(name, np.array_equal(np.asarray(gathered), wanted))


def _deleted(name: str, findings: Findings) -> None:
    source = jnp.zeros((64, 64))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(source))
    findings.check(name, source.is_deleted())


def _error_array(findings: Findings) -> None:
    transfer = importlib.import_module("jax.experimental.transfer")
    if not hasattr(transfer, "make_error_array"):
        raise Skipped(f"jax {jax.__version__} makes no error arrays")
    array = transfer.make_error_array(_spec((4,), "float32"), "injected")
    findings.fact(error_array_says_ready=bool(array.is_ready()))
    try:
        jax.block_until_ready(array)
    except RuntimeError:
        findings.check("an error array raises when waited for", True)
    else:
        findings.check("an error array raises when waited for", False)


def _transfers(clock: Clock, findings: Findings) -> None:
    try:
        servers = TransferServers(jax.devices(), HOST)
    except Unsupported as reason:
        raise Skipped(str(reason)) from reason
    with peer(clock) as other:
        _intact(servers, other, findings)
        _unknown(servers, other, findings)
        _refused(servers, findings)
        _withdrawn(servers, other, findings)
        _like_sized(servers, other, findings)
        _killed(servers, other, findings)


def _intact(servers: TransferServers, other: Peer, findings: Findings) -> None:
    connection = servers.connect(other.address)
    for seed, dtype in enumerate(("float32", "bfloat16", "int8")):
        shape = (*SHAPE[:1], SHAPE[1] + seed, *SHAPE[2:])
        uuid = other.offer(seed, shape, dtype)
        got = _pull(other, connection, uuid, _spec(shape, dtype))
        findings.check(f"{dtype} arrives bit for bit", np.asarray(got).tobytes() == values(seed, shape, dtype).tobytes())


def _unknown(servers: TransferServers, other: Peer, findings: Findings) -> None:
    connection = servers.connect(other.address)
    began_s = time.monotonic()
    reason = _failure(connection, 12345, SHORT_S)
    seconds = time.monotonic() - began_s
    findings.check(
        "an unknown key ends at our deadline", reason is not None and seconds < SHORT_S + LATE_S, f"{seconds:.2f} s: {reason}"
    )
    got = _pull(other, connection, other.offer(7, SHAPE, "float32"), _spec(SHAPE, "float32"))
    findings.check("the next pull works", np.array_equal(np.asarray(got), values(7, SHAPE, "float32")))


def _refused(servers: TransferServers, findings: Findings) -> None:
    """A peer that is not there: the library would try for ever."""
    began_s = time.monotonic()
    reason = _failure(servers.connect(f"{HOST}:{free_port()}"), 12345, SHORT_S)
    seconds = time.monotonic() - began_s
    is_soon = reason is not None and seconds < SHORT_S + LATE_S
    findings.check("a peer that is not there is given up at our deadline", is_soon, f"{seconds:.2f} s: {reason}")


def _withdrawn(servers: TransferServers, other: Peer, findings: Findings) -> None:
    connection = servers.connect(other.address)
    uuid = other.offer(8, SHAPE, "float32")
    other.withdraw(uuid)
    began_s = time.monotonic()
    reason = _failure(connection, uuid, other.clock.at_most(PULL_S))
    findings.fact(withdrawn_is_known_after_ms=1e3 * (time.monotonic() - began_s), withdrawn_says=str(reason)[:200])
    findings.check("a withdrawn array fails the pull", reason is not None)


def _like_sized(servers: TransferServers, other: Peer, findings: Findings) -> None:
    """Equal bytes, another dtype: on a CPU nobody notices, and that is why specs come from Hello."""
    connection = servers.connect(other.address)
    uuid = other.offer(9, SHAPE, "float32")
    try:
        _pull(other, connection, uuid, _spec(SHAPE, "int32"))
    except PieceError as error:
        findings.fact(spec_of_equal_size_is_noticed=str(error)[:200])
    else:
        findings.fact(spec_of_equal_size_is_noticed=False)


def _killed(servers: TransferServers, other: Peer, findings: Findings) -> None:
    """A pull that waits for a key that never comes, when the other process dies."""
    connection = servers.connect(other.address)
    _pull(other, connection, other.offer(10, SHAPE, "float32"), _spec(SHAPE, "float32"))  # connected
    struck_s = [0.0]

    def strike() -> None:
        struck_s[0] = time.monotonic()
        os.kill(other.process.pid, signal.SIGKILL)

    timer = threading.Timer(0.3, strike)
    timer.start()
    reason = _failure(connection, 54321, PULL_S)
    seconds = time.monotonic() - struck_s[0]
    timer.join()
    findings.check(
        "a pull ends when the other process is killed",
        reason is not None and seconds < PULL_S,
        f"{1e3 * seconds:.0f} ms: {reason}",
    )


@contextmanager
def _cold(setting: Setting) -> Iterator[list[subprocess.Popen[str]]]:
    """The exact step compiled by two processes that have no compiled programs to share; killed at the end."""
    with ExitStack() as stack:
        started = []
        for number in range(2):
            cache = tempfile.mkdtemp(dir=setting.scratch)
            command = [sys.executable, "-m", "gpu_kit.cold_bits", *(["--small"] if setting.small else [])]
            environment = {**with_our_pid(os.environ), "JAX_COMPILATION_CACHE_DIR": cache}
            with setting.log(f"cold{number}").open("wb") as log:
                process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def _same_bits(cold: list[subprocess.Popen[str]], setting: Setting, findings: Findings) -> None:
    """Otherwise P and D would be exact only with compiled programs they share (--compilation-cache-dir)."""
    ends_s = time.monotonic() + COLD_SHARE * setting.clock.left_s()
    said = [process.communicate(timeout=max(0.0, ends_s - time.monotonic()))[0].strip() for process in cold]
    findings.check("two cold compilations of the exact step give equal bits", all(said) and len(set(said)) == 1, str(said))


def _spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _pull(other: Peer, connection: TransferConnection, uuid: int, spec: jax.ShapeDtypeStruct) -> jax.Array:
    ends_s = time.monotonic() + other.clock.at_most(PULL_S)
    return connection.end(connection.begin(uuid, [spec], ends_s), ends_s)[0]


def _failure(connection: TransferConnection, uuid: int, within_s: float) -> PieceError | None:
    ends_s = time.monotonic() + within_s
    try:
        connection.end(connection.begin(uuid, [_spec(SHAPE, "float32")], ends_s), ends_s)
    except PieceError as error:
        return error
    return None
