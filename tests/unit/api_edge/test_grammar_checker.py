"""The process that checks grammars does not outlive what asks it."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict

import psutil
import pytest

from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.core.errors import Unavailable
from jdisagg.core.metrics import Metrics
from jdisagg.text import grammar_checker
from jdisagg.text.grammar_checker import MOST_S
from tests.unit.api_edge.gate_rig import ENDLESS, GOOD
from tests.unit.text.grammar_rig import demo_vocabulary, regex
from tests.unit.wire.rig import run_quiet, until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("when", ["never used", "idle", "starting", "compiling", "hanging", "with others waiting", "twice"])
def test_closing_leaves_nothing_and_starts_nothing(when: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        gate, tasks = GrammarGate(demo_vocabulary(), Metrics()), list[asyncio.Task[None]]()
        if when not in {"never used", "starting"}:
            await gate.prepare(GOOD[0])
        started = {
            "starting": GOOD[:1],
            "compiling": GOOD[1:2],
            "hanging": [ENDLESS],
            "with others waiting": [ENDLESS, *GOOD[1:5]],
        }
        tasks = [asyncio.create_task(gate.prepare(grammar)) for grammar in started.get(when, ())]
        await asyncio.sleep(0.2 if "ing" in when and when != "starting" else 0.0)
        for _ in range(2 if when == "twice" else 1):
            closing = asyncio.create_task(gate.aclose())
            assert await until(closing.done) < 3.0, "it waits for no grammar"
            await closing
        assert gate._checker._process is None
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError | Unavailable)
        with pytest.raises(Unavailable, match="about to end"):
            await gate.prepare(regex("late"))
        assert gate._checker._process is None

    run_quiet(body())
    gc.collect()
    assert "never retrieved" not in caplog.text


PARENT = """
import asyncio, sys
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.core.metrics import Metrics
from tests.unit.api_edge.gate_rig import ENDLESS, GOOD
from tests.unit.text.grammar_rig import demo_vocabulary

async def main():
    gate = GrammarGate(demo_vocabulary(), Metrics())
    await gate.prepare(GOOD[0])
    task = asyncio.create_task(gate.prepare(ENDLESS)) if sys.argv[1] == "hanging" else None
    await asyncio.sleep(0.5)
    print(gate._checker._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("doing", ["idle", "hanging"])
def test_the_checker_ends_with_its_server_whatever_ended_that(doing: str) -> None:
    async def body() -> None:
        server = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, doing, stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        checker = psutil.Process(int(await server.stdout.readline()))
        assert _runs(checker)()
        server.kill()
        await server.wait()
        assert await until(lambda: not _runs(checker)()) < MOST_S + 1.0

    run_quiet(body())


def _runs(process: psutil.Process) -> Callable[[], bool]:
    return lambda: process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("hard", "asked"), [(resource.RLIM_INFINITY, None), (2**40, None), (2**20, 2**20)])
def test_a_limit_that_whoever_started_the_server_has_set_is_kept(
    hard: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To raise it is refused, where one may not."""
    limits = dict[int, tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update({kind: pair}))
    for owner, name in ((grammar_checker.threading, "stack_size"), (grammar_checker.signal, "signal")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(grammar_checker.threading, "excepthook", None)
    vocabulary = demo_vocabulary()
    given = asdict(vocabulary)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(given) + "\n"))
    grammar_checker.main()
    soft, kept = limits[resource.RLIMIT_AS]
    assert kept == hard
    assert 2**27 < soft < 2**40 if asked is None else soft == asked


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_grammar_takes_is_seen_whatever_the_c_library_tells(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells:
        monkeypatch.setattr(grammar_checker.ctypes, "CDLL", lambda _: object())
    before = grammar_checker._allocated()
    held = bytearray(2**26)
    assert 2**25 < grammar_checker._allocated() - before < 2**27
    assert len(held) == 2**26
