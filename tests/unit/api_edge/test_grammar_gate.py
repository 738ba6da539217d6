"""Grammars that nobody has seen: what no compiler survives ends a process of its own, and one request."""

from __future__ import annotations

import asyncio
import logging
import sys
from time import monotonic

import pytest

from jdisagg.api.generation import grammar_gate
from jdisagg.api.generation.grammar_gate import MOST_KNOWN, MOST_WAITING, GrammarGate
from jdisagg.core.errors import InvalidRequest, Overloaded
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Grammar
from jdisagg.text.bad_words import without
from jdisagg.text.grammar_checker import MOST_S
from tests.unit.api_edge.gate_rig import ENDLESS, GOOD, begun, passed, pid_of, refused
from tests.unit.text.grammar_rig import demo_vocabulary, lark, regex, schema
from tests.unit.wire.rig import run_quiet, until

CHAIN = lark("\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000)), 'r5000: "x"']) + "\n")
GIGABYTES = schema('{"type": "integer", "multipleOf": 1000003}')
LEAST = schema('{"const": -9223372036854775808}')  # llguidance 1.9.1 turns its sign for ever
SHORT_S = 2.0  # a machine stands still for one

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself, which gives a grammar less."""
    code = f"from jdisagg.text import grammar_checker as checker; checker.MOST_S = {SHORT_S}; checker.main()"
    monkeypatch.setattr(grammar_gate, "_COMMAND", (sys.executable, "-c", code))


@pytest.mark.parametrize("bad", [CHAIN, LEAST, ENDLESS, GIGABYTES], ids=["stack", "bug", "time", "memory"])
def test_what_no_compiler_survives_is_refused_alone_and_remembered(
    bad: Grammar, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        first, (one, next_one) = pid_of(gate), (bad, GOOD[1])
        asked = [asyncio.create_task(gate.prepare(grammar)) for grammar in (one, next_one)]
        with pytest.raises(InvalidRequest, match="takes too long or too much memory"):
            await asked[0]
        await asked[1]
        assert passed(gate, next_one)
        second = pid_of(gate)
        assert second != first
        began_s = monotonic()
        assert "takes too long or too much memory" in await refused(gate, bad)
        assert monotonic() - began_s < SHORT_S / 2
        assert pid_of(gate) == second, "it is not asked again"
        assert "ended the process that checks them" in caplog.text
        await gate.aclose()

    with caplog.at_level(logging.WARNING):
        run_quiet(body())


def test_what_is_wrong_with_a_grammar_is_said_and_ends_no_process() -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        first = pid_of(gate)
        for bad, why in (
            (regex("("), "unclosed group"),
            (schema("{"), "EOF"),
            (regex("\ud800"), "surrogates"),
            (lark(""), "Empty"),
            (without([""]), "strings of 1 to"),
        ):
            assert why in await refused(gate, bad)
        await gate.prepare(without(["import"]))
        assert pid_of(gate) == first
        await gate.aclose()

    run_quiet(body())


@pytest.mark.parametrize(
    "large",
    [schema('{"type":"integer","multipleOf":49999}'), schema('{"type":"integer","multipleOf":9973}'), regex("a{20000}")],
)
def test_a_short_grammar_that_takes_much_memory_once_compiled_is_refused_however_many_came_before(large: Grammar) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        for fine in (regex("a{2000}"), regex(r"\p{L}{0,1000}"), without(["import"]), regex("a" * 60_000)):
            await gate.prepare(fine)
        first = pid_of(gate)
        assert "make it simpler" in await refused(gate, large)
        await gate.prepare(regex("a{3000}"))
        assert "of 4.0 that one of its length may take" in await refused(gate, regex("b{20000}"))
        assert pid_of(gate) == first
        await gate.aclose()

    run_quiet(body())


def test_so_many_answers_are_remembered_and_the_one_that_was_used_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MOST_KNOWN > 10
    monkeypatch.setattr(grammar_gate, "MOST_KNOWN", 2)

    async def body() -> None:
        gate, asked = GrammarGate(demo_vocabulary(), Metrics()), list[str]()
        ask = gate._checker.ask
        monkeypatch.setattr(gate._checker, "ask", lambda grammar: asked.append(grammar.text) or ask(grammar))
        for text in ("(", "((", "(((", "((", "(((", "("):
            await refused(gate, regex(text))
        assert asked == ["(", "((", "(((", "("]
        for text in ("a", "b", "a", "c", "a", "b"):
            await gate.prepare(regex(text))
        assert asked[4:] == ["a", "b", "c", "b"]
        await gate.aclose()

    run_quiet(body())


def test_grammars_that_each_take_much_do_not_take_of_what_the_next_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from jdisagg.text import grammar_checker as checker; checker._MOST_BYTES = 2**28; checker.main()"
    monkeypatch.setattr(grammar_gate, "_COMMAND", (sys.executable, "-c", code))

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(regex("a"))
        first = pid_of(gate)
        for i in range(4):  # 80 MB each
            await gate.prepare(regex(f"{i}" + "a" * 200_000))
        assert pid_of(gate) == first
        await gate.aclose()

    run_quiet(body())


def test_requests_with_one_grammar_share_its_check_and_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        gate, asked = GrammarGate(demo_vocabulary(), Metrics()), list[Grammar]()
        ask = gate._checker.ask
        monkeypatch.setattr(gate._checker, "ask", lambda grammar: asked.append(grammar) or ask(grammar))
        await asyncio.gather(*(gate.prepare(GOOD[0]) for _ in range(50)))
        await gate.prepare(GOOD[0])
        assert asked == GOOD[:1]
        assert passed(gate, GOOD[0])
        errors = await asyncio.gather(*(gate.prepare(regex("(")) for _ in range(50)), return_exceptions=True)
        assert {type(error) for error in errors} == {InvalidRequest}
        assert asked == [GOOD[0], regex("(")]
        await gate.aclose()

    run_quiet(body())


def test_who_waits_no_longer_ends_the_check_for_nobody_else_and_leaves_its_answer_to_no_other_question(impatient: None) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        one = await begun(gate, gate.prepare(ENDLESS))
        other = asyncio.create_task(gate.prepare(ENDLESS))
        await asyncio.sleep(0)
        one.cancel()
        next_one = asyncio.create_task(gate.prepare(regex("(")))
        await asyncio.sleep(0)
        assert one.cancelled() or await asyncio.gather(one, return_exceptions=True)
        assert not other.done()
        with pytest.raises(InvalidRequest, match="too long"):
            await other
        with pytest.raises(InvalidRequest, match="unclosed"):
            await next_one
        alone = asyncio.create_task(gate.prepare(GOOD[1]))
        await asyncio.sleep(0.001)
        alone.cancel()
        assert "unclosed" in await refused(gate, regex("a("))
        await until(lambda: passed(gate, GOOD[1]))
        await gate.aclose()

    run_quiet(body())


def test_each_of_many_clients_at_once_may_have_a_grammar_of_its_own() -> None:
    """Sixty-four are what benchmarks of such answers send together; ordinary ones are checked in milliseconds."""

    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        new = [regex(f"{i}[a-z]") for i in range(64)]
        await asyncio.gather(*map(gate.prepare, new))
        assert passed(gate, *new)
        await gate.aclose()

    run_quiet(body())


def test_more_than_so_many_new_grammars_at_once_are_told_to_come_again(impatient: None) -> None:
    async def body() -> None:
        gate = GrammarGate(demo_vocabulary(), Metrics())
        await gate.prepare(GOOD[0])
        tasks = [asyncio.create_task(gate.prepare(grammar)) for grammar in (ENDLESS, *GOOD[1:MOST_WAITING])]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="send the request again") as error:
            await gate.prepare(GOOD[MOST_WAITING])
        assert error.value.retry_after_s == MOST_S
        await gate.prepare(GOOD[0])
        again = asyncio.create_task(gate.prepare(GOOD[1]))  # it waits already
        results = await asyncio.gather(*tasks, again, return_exceptions=True)
        assert [type(result) for result in results] == [InvalidRequest, *[type(None)] * MOST_WAITING]
        await gate.prepare(GOOD[MOST_WAITING])
        assert passed(gate, GOOD[MOST_WAITING])
        await gate.aclose()

    run_quiet(body())
