"""Grammars to ask a `GrammarGate` about, and a look at its checker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from jdisagg.api.generation.grammar_gate import MOST_WAITING, GrammarGate
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar
from tests.unit.text.grammar_rig import regex, schema
from tests.unit.wire.rig import until

T = TypeVar("T")

SLOW, ENDLESS = (  # half a second or so, and minutes
    schema(json.dumps({"allOf": [{"type": "string", "pattern": f".*x{i}.*"} for i in range(number)]})) for number in (12, 20)
)
GOOD = [regex(f"good{i}") for i in range(MOST_WAITING + 2)]


def pid_of(gate: GrammarGate) -> int:
    process = gate._checker._process
    assert process is not None
    return process.pid


async def begun(gate: GrammarGate, asking: Coroutine[Any, Any, T], then: Callable[[], None] = lambda: None) -> asyncio.Task[T]:
    """What asks about a grammar, which the checker has said that it compiles; in that moment `then` is called."""
    checker, said = gate._checker, list[bytes]()
    read = checker._read

    def noted() -> bytes:
        said.append(read())
        if said[-1] == b"{}\n":
            checker._read = read  # type: ignore[method-assign]
            then()
        return said[-1]

    checker._read = noted  # type: ignore[method-assign]
    asked = asyncio.create_task(asking)
    await until(lambda: b"{}\n" in said)
    return asked


def passed(gate: GrammarGate, *grammars: Grammar) -> bool:
    """All of them are known to be good."""
    return all(gate._known.get(grammar) == "" for grammar in grammars)


async def refused(gate: GrammarGate, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as error:
        await gate.prepare(grammar)
    assert error.value.field == "grammar"
    return error.value.message
