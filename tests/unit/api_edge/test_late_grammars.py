"""Who waits until a grammar is checked, his own or those before it, waits no longer than his deadline."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from jdisagg.api.generation import grammar_gate
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.grammar_gate import GrammarGate
from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Grammar, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine
from tests.unit.api_edge.gate_rig import GOOD, passed, pid_of
from tests.unit.text.grammar_rig import demo_vocabulary
from tests.unit.wire.rig import run_quiet, until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_deadline_passes_while_a_grammar_is_checked(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer, grammars=gate)
        await gate.prepare(GOOD[0])
        os.kill(checker := pid_of(gate), signal.SIGSTOP)
        late = {name: asyncio.create_task(edge.admit(request(GOOD[i], 0.3, name))) for i, name in enumerate(("r1", "r2"), 1)}
        in_time = asyncio.create_task(edge.admit(request(GOOD[3], 60.0)))
        for name, task in late.items():
            with pytest.raises(DeadlineExceeded, match=f"request {name}: its deadline passed before"):
                await task
        os.kill(checker, signal.SIGCONT)
        await in_time
        assert passed(gate, *GOOD[:4]), "what was begun is there for the next one"
        await gate.aclose()

    run_quiet(body())


def test_a_check_that_fails_when_nobody_waits_any_more_leaves_no_traceback(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    code = f"import os, time\nwhile not os.path.exists({str(late)!r}): time.sleep(0.05)"
    monkeypatch.setattr(grammar_gate, "_COMMAND", (sys.executable, "-c", code))

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer, grammars=gate)
        with pytest.raises(DeadlineExceeded):
            await edge.admit(request(GOOD[0], 0.1))
        assert gate._checks
        late.touch()
        await until(lambda: not gate._checks)
        gc.collect()
        await gate.aclose()

    run_quiet(body())
    assert "never retrieved" not in caplog.text


def request(grammar: Grammar, timeout_s: float, request_id: str = "r") -> TextRequest:
    return TextRequest(request_id=request_id, prompts=("the",), sampling=SamplingParams(grammar=grammar), timeout_s=timeout_s)
