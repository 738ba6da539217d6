"""A child process and its pipes."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest
import uvloop

from jdisagg.core.logs import to_stderr
from jdisagg.serve.child import Child, ChildSpec

READY = """
import pathlib, sys
print('{"event": "ready", "role": "decode"}', flush=True)
pathlib.Path(sys.argv[1]).touch()
sys.stdin.read()
"""
TALKS = "import sys\nfor _ in range(40_000): print(100 * 'x', file=sys.stderr)"


def talk(stderr: TextIO, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a child that says 4 MB, more than all buffers on the way, while this is the supervisor's stderr."""

    async def body() -> int:
        monkeypatch.setattr(sys, "stderr", stderr)
        spec = ChildSpec(name="talker", command=lambda _: (sys.executable, "-c", TALKS))
        child = await Child.start(spec, None, to_stderr())
        try:
            async with asyncio.timeout(120.0):
                return await child.wait()
        finally:
            monkeypatch.undo()
            await child.stop(0.1)

    return asyncio.run(body())


def test_a_child_goes_on_when_whoever_read_what_the_supervisor_prints_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text[:20])

    assert talk(Closed(), monkeypatch) == 0


def test_a_child_goes_on_when_nobody_reads_what_the_supervisor_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stderr:
        assert talk(stderr, monkeypatch) == 0
    assert os.read(reader, 2**20).startswith(b"talker | xxx")
    os.close(reader)


SAYS = """
import sys, time
for text in ("a", "b\\n\\nc\\r\\n", "d" * 3_000_000 + "\\ne"):
    sys.stderr.write(text)
    sys.stderr.flush()
    time.sleep(0.1)
"""


def test_lines_of_a_child_are_passed_on_whole_but_for_long_ones_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()

    async def body() -> None:
        monkeypatch.setattr(sys, "stderr", said)
        child = await Child.start(ChildSpec(name="p", command=lambda _: (sys.executable, "-c", SAYS)), None, to_stderr())
        async with asyncio.timeout(60.0):
            assert await child.wait() == 0
        await child.stop(0.1)

    asyncio.run(body())
    monkeypatch.undo()
    lines = [line.removeprefix("p | ") for line in said.getvalue().splitlines()]
    assert (lines[:3], lines[-1]) == (["ab", "", "c"], "e")
    assert "".join(lines[3:-1]) == "d" * 3_000_000
    assert max(map(len, lines)) <= 2**20 + 2**16


def test_a_child_that_was_ready_while_its_supervisor_stood_still_came_in_time(tmp_path: Path) -> None:
    """The loop of a supervisor looks at its clock before it reads."""

    async def body() -> None:
        spec = ChildSpec(name="decode-0", command=lambda _: (sys.executable, "-c", READY, str(tmp_path / "said")))
        child = await Child.start(spec, None, to_stderr())
        waiting = asyncio.create_task(child.wait_ready(0.5))
        await asyncio.sleep(0.0)
        while not (tmp_path / "said").exists():
            time.sleep(0.05)
        time.sleep(0.6)
        ready = await waiting
        await child.stop(1.0)
        assert ready is not None
        assert ready.role == "decode"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


SHORT_OF_DESCRIPTORS = """
import asyncio, os, resource, sys, uvloop
from jdisagg.core.logs import to_stderr
from jdisagg.serve.child import Child, ChildSpec

def descriptors():
    return sorted(map(int, os.listdir("/proc/self/fd")))

async def start():
    child = await Child.start(ChildSpec(name="x", command=lambda _: ("true",)), None, to_stderr())
    await child.stop(60.0)

async def settled(most):
    for _ in range(1000):  # pipes are closed some turns of the loop later
        if len(descriptors()) <= most:
            break
        await asyncio.sleep(0.01)

async def main():
    await start()
    await asyncio.sleep(0.5)
    before, errors = len(descriptors()), []
    for free in range(20):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors()[-2] + 1 + free, limits[1]))
        try:
            await start()
            errors.append(0)
        except OSError as error:
            errors.append(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await settled(before)
    print(max(0, len(descriptors()) - before), *errors)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_a_child_for_which_there_are_too_few_descriptors_is_not_started_and_takes_none_for_good() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS], capture_output=True, text=True, timeout=240.0, check=False
    )
    num_more, *errors = map(int, done.stdout.split())
    assert (num_more, done.stderr) == (0, "")
    few = errors.index(0)
    assert few >= 6, "its three pipes, to begin with"
    assert errors == [errno.EMFILE] * few + [0] * (20 - few)
