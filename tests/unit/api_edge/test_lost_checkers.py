"""Checkers of grammars that end, stand still or do not start through no fault of a grammar: it is not held against one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from jdisagg.api.generation import grammar_gate
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.core.errors import Unavailable
from jdisagg.core.metrics import Metrics
from tests.unit.api_edge.gate_rig import ENDLESS, GOOD, SLOW, begun, passed, pid_of, refused
from tests.unit.text.grammar_rig import demo_vocabulary
from tests.unit.wire.rig import run_quiet

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WITHOUT_THREADS = """
import threading
from jdisagg.text.grammar_checker import main

def none_left(_):
    raise RuntimeError("can't start new thread")

threading.Thread.start = none_left
main()
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_a_checker_that_something_else_killed_speaks_against_no_grammar(wait_s: float) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        for i in range(3):
            await gate.prepare(GOOD[i])
            os.kill(pid_of(gate), signal.SIGKILL)
            await asyncio.sleep(wait_s)
        await gate.prepare(GOOD[3])
        assert passed(gate, *GOOD[:4])
        await gate.aclose()

    run_quiet(body())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_grammar_in_whose_middle_something_else_kills_the_checker_may_come_again(number: signal.Signals) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        asked = await begun(gate, gate.prepare(SLOW), lambda: os.kill(pid_of(gate), number))
        with pytest.raises(
            Unavailable, match=r"^grammars cannot be checked, .*something else ended it; send the request again"
        ):
            await asked
        assert "Unable to determine" in await refused(gate, SLOW), "what is wrong with it"
        await gate.aclose()

    run_quiet(body())


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nowhere/python",), "No such file or directory: '/nowhere/python'"),
        ((sys.executable, "-c", "import nothing_of_that_name"), "it ended as it started"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), "it ended as it started"),
        ((sys.executable, "-c", "input()"), "it ended as it started"),
        ((sys.executable, "-c", WITHOUT_THREADS), "it ended as it started"),
    ],
)
def test_a_checker_that_does_not_start_speaks_against_no_grammar(
    command: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_gate, "_TOLD_EVERY_S", 600.0)

    async def body() -> None:
        gate, works = GrammarGate(demo_vocabulary(), Metrics()), grammar_gate._COMMAND
        monkeypatch.setattr(grammar_gate, "_COMMAND", command)
        for _ in range(2):
            with pytest.raises(Unavailable, match=f"^grammars cannot be checked, .*{why}$"):
                await gate.prepare(GOOD[0])
        (said,) = caplog.messages
        assert said.startswith("requests with a grammar that is new here fail: grammars cannot be checked")
        assert said.endswith(why)
        monkeypatch.setattr(grammar_gate, "_COMMAND", works)
        await gate.prepare(GOOD[0])
        await gate.aclose()
        ended = GrammarGate(demo_vocabulary(), Metrics())  # it has said nothing yet
        await ended.aclose()
        with pytest.raises(Unavailable, match="about to end"):
            await ended.prepare(GOOD[1])
        assert caplog.messages == [said]

    run_quiet(body())


def test_a_machine_that_has_no_thread_left_speaks_against_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Unavailable, match=r"^grammars cannot be checked, .*can't start new thread"):
                await gate.prepare(GOOD[0])
        await gate.prepare(GOOD[0])
        await gate.aclose()

    run_quiet(body())


def test_a_checker_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_gate, "_WAIT_S", 0.5)

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        os.kill(first := pid_of(gate), signal.SIGSTOP)
        await gate.prepare(GOOD[1])
        assert pid_of(gate) != first
        await gate.aclose()

    run_quiet(body())


def test_where_the_next_one_stands_still_as_well_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"""
import os, time
try:
    os.mkdir({str(tmp_path / "first")!r})
except FileExistsError:
    time.sleep(600)
else:
    from jdisagg.text import grammar_checker
    grammar_checker.main()
"""
    monkeypatch.setattr(grammar_gate, "_COMMAND", (sys.executable, "-c", code))

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        for name in ("_WAIT_S", "_START_S"):
            monkeypatch.setattr(grammar_gate, name, 0.3)
        os.kill(pid_of(gate), signal.SIGSTOP)
        for grammar in (GOOD[1], GOOD[2]):  # whoever comes next finds none, and waits no longer
            with pytest.raises(Unavailable, match=r"^grammars cannot be checked, .*it ended as it started"):
                async with asyncio.timeout(15):
                    await gate.prepare(grammar)
        await gate.aclose()

    run_quiet(body())


def test_a_grammar_that_the_machine_had_no_time_for_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_gate, "_WAIT_S", 2.0)

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        asked = await begun(gate, gate.prepare(ENDLESS), lambda: os.kill(pid_of(gate), signal.SIGSTOP))
        with pytest.raises(Unavailable, match=r"grammars cannot be checked, .* no time to within 2 s"):
            await asked
        monkeypatch.undo()
        assert set(gate._known) == {GOOD[0]}
        await gate.prepare(GOOD[1])
        await gate.aclose()

    run_quiet(body())
