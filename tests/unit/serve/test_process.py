"""What a signal shows of a process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from threading import Timer

import pytest

from jdisagg.serve import process as module
from jdisagg.serve.process import ONE_TELLING_S, Process

STARTING = """
import asyncio, sys, threading, time
from jdisagg.serve.process import end_when_told, run_process

def compile_a_model():
    time.sleep(60)

async def serve(process):
    threading.Thread(target=compile_a_model, daemon=True).start()
    await asyncio.sleep(0.05)
    print("begun", flush=True)
    await process.stopping.wait()
    return 0

end_when_told()
sys.exit(run_process(serve))
"""


def test_sigusr1_shows_what_a_process_does_that_is_still_starting() -> None:
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGUSR1)
        said = [process.stderr.readline()]
        while said[-1] and not said[-1].startswith("{"):
            said.append(process.stderr.readline())
        process.terminate()
        assert "in compile_a_model" in "".join(said)
        state = json.loads(said[-1])
        assert (state["event"], state["pid"], state["stage"]) == ("state", process.pid, "starting")
        assert state["seconds"] >= 0.05
    assert process.returncode == 0


@contextmanager
def reading_settings(directory: Path, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A server whose settings do not come: it has only just been started. Killed after four minutes."""
    settings = directory / "settings.toml"
    os.mkfifo(settings)
    command = [sys.executable, "-m", "jdisagg.serve", "--config", str(settings)]
    with subprocess.Popen(command, stderr=stderr, text=True) as process:
        watch = Timer(240.0, process.kill)
        watch.start()
        with settings.open("w"):  # it reads them now
            yield process
        watch.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_has_just_been_started_ends_when_told(tmp_path: Path, number: signal.Signals) -> None:
    """As process 1 of a container it would not hear of a signal that it has no handler for."""
    with reading_settings(tmp_path) as process:
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == 0
    text = "ended while it was starting; no request was lost"
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\S+ I serve\[{process.pid}\] jdisagg\.serve\.process: {text}\n", said)


def test_a_collector_of_json_lines_gets_one_of_a_process_that_has_just_been_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JDISAGG_LOG_FORMAT", "json")
    monkeypatch.setenv("JDISAGG_LOG_LEVEL", "error")  # it is said all the same
    with reading_settings(tmp_path) as process:
        process.terminate()
        _, said = process.communicate()
    assert process.returncode == 0
    assert said.count("\n") == 1
    found = json.loads(said)
    assert datetime.fromisoformat(found.pop("time")).utcoffset() is not None
    wanted = {"level": "info", "role": "serve", "pid": process.pid, "logger": "jdisagg.serve.process"}
    assert found == wanted | {"message": "ended while it was starting; no request was lost"}


def test_sigusr1_shows_where_a_process_hangs_that_has_not_begun_to_load(tmp_path: Path) -> None:
    with reading_settings(tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while said[-1] and " in load_config" not in said[-1]:
            said.append(process.stderr.readline())
        process.terminate()
        process.communicate()
    assert said[-1], said
    assert process.returncode == 0


def test_a_process_that_is_told_to_end_while_it_writes_its_stacks_ends(tmp_path: Path) -> None:
    """Whoever reads them is slow, so that the signal comes in the midst of them: of a pipe nobody waits for room, of a socket
    one does."""
    here, there = socket.socketpair()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as small as there is
    with reading_settings(tmp_path, stderr=there.fileno()) as process, here, there:
        process.send_signal(signal.SIGUSR1)
        seen = -1
        while process.poll() is None and (seen <= 0 or _waiting(here) > seen):  # it has begun, and goes on
            seen = _waiting(here)
            time.sleep(0.1)
        process.terminate()
        there.close()
        with here.makefile(encoding="utf-8") as said:
            assert " in load_config" in said.read()
        process.wait()
    assert process.returncode == 0


def _waiting(end: socket.socket) -> int:
    """Bytes that have not been read."""
    return int.from_bytes(fcntl.ioctl(end, termios.FIONREAD, bytes(4)), sys.byteorder)


@contextmanager
def unread() -> Iterator[int]:
    """A pipe that is full, and that nobody reads."""
    here, there = os.pipe()
    own = os.open(f"/proc/self/fd/{there}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(own, b"." * 4096)
    try:
        yield there
    finally:
        for number in (here, there, own):
            os.close(number)


@pytest.mark.parametrize(("signals", "status"), [((signal.SIGUSR1, signal.SIGTERM), 0), ((signal.SIGSEGV,), -signal.SIGSEGV)])
def test_stacks_that_nobody_reads_keep_no_process_from_its_end(signals: tuple[signal.Signals, ...], status: int) -> None:
    with (
        unread() as stderr,
        subprocess.Popen([sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            for number in signals:
                process.send_signal(number)
                time.sleep(0.2)
            assert process.wait(timeout=60.0) == status
        finally:
            process.kill()


def test_stacks_that_nobody_reads_keep_no_process_from_its_end_that_has_just_been_started(tmp_path: Path) -> None:
    with unread() as stderr, reading_settings(tmp_path, stderr=stderr) as process:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        process.terminate()
        process.wait()
    assert process.returncode == 0


def test_signals_that_come_together_are_one_and_a_later_one_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) signals the process, and then its group, which the process is in."""
    now_s, exits = [100.0], list[int]()
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.os, "_exit", exits.append)
    told = Process()
    now_s[0] = 160.0
    told._stop(signal.SIGTERM)
    assert told.stopping.is_set()
    now_s[0] += ONE_TELLING_S / 2
    told._stop(signal.SIGTERM)
    assert exits == []
    now_s[0] += ONE_TELLING_S
    told._stop(signal.SIGINT)
    assert exits == [1]


def test_the_first_signal_to_a_process_that_drains_for_a_fault_of_its_own_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, exits = [100.0], list[int]()
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.os, "_exit", exits.append)
    faulty = Process()
    now_s[0] = 160.0
    faulty.end_with(72)
    now_s[0] += 60.0
    faulty._stop(signal.SIGTERM)
    assert (exits, faulty.stopping.is_set(), faulty.status) == ([], True, 72)
    now_s[0] += 2 * ONE_TELLING_S
    faulty._stop(signal.SIGTERM)
    assert exits == [1]


IMPORTED = """
import gc
from jdisagg.serve.__main__ import main

full_searches = []
gc.callbacks.append(lambda phase, info: full_searches.append(phase) if info["generation"] == 2 else None)
main(["--role", "unified", "--model", "/nowhere"])  # does all that it does before it imports the role
import jdisagg.serve.worker
print(full_searches)
"""


def test_a_worker_that_starts_is_not_searched_for_garbage_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=240.0, check=True)
    assert done.stdout == "[]\n", done.stderr


SHORT_OF_THREADS = """
import asyncio, sys, threading
from jdisagg.serve.process import run_process

def none_left(_):
    raise RuntimeError("can't start new thread")

async def serve(process):
    threading.Thread.start = none_left
    found = await asyncio.gather(*(asyncio.to_thread(str, number) for number in range(100)))
    return 0 if found == [str(number) for number in range(100)] else 1

sys.exit(run_process(serve))
"""


def test_a_process_whose_machine_has_no_thread_left_does_what_takes_long_beside_its_loop_and_ends_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", SHORT_OF_THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


FAULTY = """
import asyncio, sys
from jdisagg.serve.process import run_process

async def serve(process):
    process.end_with(72)
    await process.stopping.wait()
    return int(sys.argv[1])

sys.exit(run_process(serve))
"""


@pytest.mark.parametrize(("drained", "status"), [("0", 72), ("1", 1)])
def test_a_process_that_ends_for_a_fault_of_its_own_says_so_by_its_status(drained: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", FAULTY, drained], capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, done.stderr) == (status, "")
