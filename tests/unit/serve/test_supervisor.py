"""What a supervisor does when a child cannot even be started."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.core.config import Config
from jdisagg.core.outlet import Outlet
from jdisagg.serve import local
from jdisagg.serve import supervisor as module
from jdisagg.serve.child import Child, ChildSpec
from jdisagg.serve.process import ONE_TELLING_S, Process
from jdisagg.serve.ready import Ready
from jdisagg.serve.supervisor import Patience, StartFailed, Supervisor

FAKE = Path(__file__).with_name("fake_child.py")
QUICK = Patience(first_delay_s=0.01, max_delay_s=0.05, grace_s=10.0)
LIMIT_S = 60.0
NO_PROCESS = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
Start = Callable[[ChildSpec, Ready | None, Outlet], Any]


def spec(directory: Path) -> ChildSpec:
    """Of the fake child."""
    environ = {"FAKE_DIR": str(directory)}
    return ChildSpec(name="p", command=lambda _: (sys.executable, str(FAKE), "--role", "prefill"), environ=environ)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool], error: Exception = NO_PROCESS) -> list[int]:
    """No child is to be had where `fails` says so of the n-th attempt; returns the attempts."""
    attempts: list[int] = []
    start: Start = Child.start

    async def try_to_start(of: ChildSpec, previous: Ready | None, outlet: Outlet) -> Child:
        attempts.append(len(attempts))
        if fails(attempts[-1]):
            raise error
        return await start(of, previous, outlet)

    monkeypatch.setattr(Child, "start", try_to_start)
    return attempts


DRAINING = """
import asyncio, pathlib, sys
from jdisagg.serve.process import end_when_told, run_process
from jdisagg.serve.ready import Ready, announce

async def serve(process):
    announce(Ready(role="decode", http=None, grpc=None, model="m"))
    await process.stopping.wait()
    pathlib.Path(sys.argv[1]).touch()
    await asyncio.sleep(1.0)
    return 0

end_when_told()
sys.exit(run_process(serve))
"""


def test_a_child_that_drains_already_is_not_cut_off_when_its_supervisor_ends(tmp_path: Path) -> None:
    """systemd tells every process of a unit to end, and then the supervisor does so once more, stage by stage."""
    told = tmp_path / "told"

    async def body() -> None:
        supervisor = Supervisor(QUICK)
        async with asyncio.timeout(LIMIT_S):
            await supervisor.start([ChildSpec(name="d", command=lambda _: (sys.executable, "-c", DRAINING, str(told)))])
            os.kill(supervisor.pids["d"], signal.SIGTERM)
            while not told.exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * ONE_TELLING_S)
            assert await supervisor.stop()

    asyncio.run(body())


def test_a_child_for_which_there_is_no_process_is_tried_again_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = failing(monkeypatch, lambda number: 1 <= number <= 5)

    async def body() -> None:
        supervisor = Supervisor(QUICK)
        async with asyncio.timeout(LIMIT_S):
            await supervisor.start([spec(tmp_path)])
            first = supervisor.pids["p"]
            os.kill(first, 9)
            while supervisor.pids.get("p", first) == first:
                await asyncio.sleep(0.01)
            assert await supervisor.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert len(attempts) == 7
    said = [record.getMessage() for record in caplog.records]
    assert sum("p: could not be started: [Errno 11]" in text for text in said) == 5


@pytest.mark.parametrize(("load_s", "serve_s"), [(40.0, 0.0), (0.0, 40.0)])
def test_the_delay_falls_back_after_a_time_of_service_whatever_loading_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load_s: float, serve_s: float
) -> None:
    """Its clock goes on while a child loads and while it serves, and at no other time."""
    environ = {"FAKE_DIR": str(tmp_path), "FAKE_MODE": "brief"}
    brief = ChildSpec(name="d", command=lambda _: (sys.executable, str(FAKE), "--role", "decode"), environ=environ)
    now_s, wait_ready, wait = [100.0], Child.wait_ready, Child.wait

    async def load(child: Child, timeout_s: float) -> Ready | None:
        ready = await wait_ready(child, timeout_s)
        now_s[0] += load_s
        return ready

    async def serve(child: Child) -> int:
        status = await wait(child)
        now_s[0] += serve_s
        return status

    monkeypatch.setattr(Child, "wait_ready", load)
    monkeypatch.setattr(Child, "wait", serve)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def body() -> None:
        supervisor = Supervisor(Patience(first_delay_s=0.02, max_delay_s=1.0, stable_s=30.0, grace_s=10.0))
        async with asyncio.timeout(LIMIT_S):
            await supervisor.start([brief])
            while supervisor.restarts < 3:
                await asyncio.sleep(0.01)
            await supervisor.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    delays_s = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple) and "again in" in record.msg]
    assert delays_s[:3] == ([0.02] * 3 if serve_s else [0.02, 0.04, 0.08])


def test_a_child_for_which_there_never_was_a_process_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = failing(monkeypatch, lambda number: True)

    async def body() -> None:
        supervisor = Supervisor(QUICK)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(StartFailed, match=r"p could not be started: .* before it was ready, 3 times"):
                await supervisor.start([spec(tmp_path)])
            await supervisor.stop()

    asyncio.run(body())
    assert len(attempts) == 3


LOADING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # as a worker ends that is not ready
for _ in range(int(sys.argv[1])):
    time.sleep(0.3)
    print("compiled", file=sys.stderr, flush=True, end=sys.argv[2])
if len(sys.argv) == 4:
    print('{"event": "ready", "role": "decode"}', flush=True)
while True:
    time.sleep(0.1)
"""


def loading(*flags: str, name: str = "d") -> ChildSpec:
    """A child that loads, and says so `flags[0]` times, each with `flags[1]` behind it; and then that it is ready, if there is
    one more."""
    return ChildSpec(name=name, command=lambda _: (sys.executable, "-c", LOADING, *flags))


def test_a_child_that_is_not_ready_and_says_nothing_is_ended_with_a_line_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        supervisor = Supervisor(replace(QUICK, silence_s=1.0))
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(
                StartFailed, match=r"^d said nothing for 1 s, and was ended before it was ready, 3 times"
            ) as failed:
                await supervisor.start([loading("1", "\n")])
            await supervisor.stop()
        assert failed.value.status == 1

    asyncio.run(body())
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.count("d: not ready, and said nothing for 1 s; ending it") == 3
    assert sum(text.startswith("d: said nothing for 1 s, and was ended; starting it again in") for text in said) == 2


def test_a_child_that_says_what_it_loads_may_take_as_long_as_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    """A bar of progress is no line."""

    async def body() -> None:
        supervisor = Supervisor(replace(QUICK, silence_s=10.0))  # for which a busy machine may keep a child from its first word
        async with asyncio.timeout(2 * LIMIT_S):
            began_s = time.monotonic()
            await supervisor.start([loading("36", "\n", "ready"), loading("36", "\r", "ready", name="bar")])
            assert time.monotonic() - began_s >= 10.5
            await supervisor.stop()

    asyncio.run(body())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_bug_of_ours_does_not_leave_a_fleet_without_one_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, lambda number: number == 1, TypeError("our bug"))

    async def body() -> None:
        supervisor = Supervisor(QUICK)
        async with asyncio.timeout(LIMIT_S):
            await supervisor.start([spec(tmp_path)])
            os.kill(supervisor.pids["p"], 9)
            await supervisor.is_broken.wait()
            await supervisor.stop()

    asyncio.run(body())
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [TypeError]


def test_a_fleet_that_cannot_be_kept_running_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda number: number == 3, TypeError("our bug"))  # three start, one is started again
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))

    async def body() -> int:
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(local, "announce", ready.set_result)
        ending = asyncio.create_task(local.serve(Config(role="local"), Process(), (sys.executable, str(FAKE))))
        async with asyncio.timeout(LIMIT_S):
            (pid,) = [worker["pid"] for worker in (await ready).workers if worker["role"] == "decode"]
            os.kill(pid, 9)
            return await ending

    assert asyncio.run(body()) == 1


def test_a_line_of_one_child_that_was_cut_ends_before_the_next_one_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader takes a part of the long line; there is room again when the second child begins."""
    reader, writer = os.pipe()
    says = "import sys; print(sys.argv[1][0] * int(sys.argv[1][1:]), file=sys.stderr); sys.exit(2)"
    specs = [
        ChildSpec(name=text[0], command=lambda _, text=text: (sys.executable, "-c", says, text)) for text in ("y500000", "z9")
    ]

    async def body() -> bytes:
        supervisor, said = Supervisor(QUICK), b""
        async with asyncio.timeout(LIMIT_S):
            for one, last in zip(specs, (b"y", b"z\n"), strict=True):
                with pytest.raises(StartFailed):
                    await supervisor.start([one])
                while not said.endswith(last):  # what is still to be passed on may come late
                    await asyncio.sleep(0.01)
                    if select.select([reader], [], [], 0.0)[0]:
                        said += os.read(reader, 2**20)
        await supervisor.stop()
        return said

    with os.fdopen(writer, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        said = asyncio.run(body()).decode().splitlines()
        monkeypatch.undo()
    os.close(reader)
    assert said[0].startswith("y | yyy")
    assert said[1:] == ["(1 lines were lost here: nobody read them)", "z | zzzzzzzzz"]
