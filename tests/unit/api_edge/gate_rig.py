"""Grammars to ask a `GrammarGate` about, and a look at its checker."""

from __future__ import annotations

import json
import os

import pytest

from jdisagg.api.generation.grammar_gate import MOST_WAITING, GrammarGate
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar
from tests.unit.text.grammar_rig import regex, schema
from tests.unit.wire.rig import until

SLOW, ENDLESS = (  # half a second or so, and minutes
    schema(json.dumps({"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(number)]})) for number in (12, 20)
)
GOOD = [regex(f"good{i}") for i in range(MOST_WAITING + 2)]


def pid_of(gate: GrammarGate) -> int:
    process = gate._checker._process
    assert process is not None
    return process.pid


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


async def until_it_compiles(gate: GrammarGate) -> None:
    """A checker that is there has begun with another grammar, which has a thread of its own there."""
    pid = pid_of(gate)
    await until(lambda: threads_of(pid) > 1)


async def refused(gate: GrammarGate, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as error:
        await gate.prepare(grammar)
    assert error.value.field == "grammar"
    return error.value.message
