"""What is no grammar, what has no end, what does not fit: errors that one line says, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import threading
from time import thread_time
from typing import Any
from weakref import WeakValueDictionary

import llguidance
import pytest

from jdisagg.core.errors import InvalidRequest, Overloaded, Unavailable
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text import grammar as grammar_module
from jdisagg.text.grammar import MOST_KEPT, Compiled, Grammars, Vocabulary, most_bytes
from tests.e2e.processes import wait_until
from tests.unit.text.grammar_rig import (
    GREEDY,
    advanced,
    allowed,
    demo_grammars,
    demo_tokenizer,
    failing,
    is_there,
    lark,
    regex,
    schema,
    walk,
)

LIMIT_S = 120.0
EOS = (1, 5)
ANY_OBJECT = schema('{"type": "object"}')


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return demo_grammars()


def encode(text: str) -> tuple[int, ...]:
    return demo_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema("{"), "EOF while parsing an object at line 1 column 1"),
        (schema(""), "EOF while parsing a value"),
        (schema('{"type": "x"}'), "Invalid type: x"),
        (schema('{"$ref": "https://example.com/x"}'), "https://example.com/x"),
        (schema('{"contains": {}}'), "contains"),
        (schema('{"type": "string", "minLength": 3, "maxLength": 2}'), "minLength"),
        (schema("[" * 100_000), "recursion limit"),
        (schema('{"type": "string", "pattern": "("}'), "unclosed group"),
        (schema('"\ud800"'), "not JSON"),
        (regex("("), "unclosed group"),
        (regex("(?=a ::= )b"), "look-around"),
        (regex("\ud800"), "surrogates not allowed"),
        (regex("[^\\x00-\\x{10FFFF}]"), "no text of this model's tokens is of it"),
        (lark(""), "Empty grammar"),
        (lark('root ::= "a" | "b"'), "EBNF"),
        (lark('start: "a" foo'), 'unknown name: "foo"'),
        (lark("start: start"), "no text of this model's tokens is of it"),
        (lark("start: <[999999]>"), "999999"),
        (regex("a\x1b[31m" + "(" * 10_000), ""),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line_that_says_why(grammars: Grammars, grammar: Grammar, why: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            grammars.matcher(grammar)
        message = refused.value.message
        assert message.startswith(f"grammar ({grammar.kind.value}): ")
        assert why in message
        assert ("EBNF" in message) == (why == "EBNF")
        assert message.isprintable()
        assert not message.endswith(":")
        assert len(message) < 500
        assert refused.value.field == "grammar"
    assert not is_there(grammars, grammar)


@pytest.mark.parametrize("text", ["z", "ba", "<|end|>"])
def test_a_token_that_does_not_fit_is_an_error_in_one_line_and_stays_one(grammars: Grammars, text: str) -> None:
    matcher = advanced(grammars, regex("ab{2,4}"), encode(text))
    error = matcher.error
    assert "doesn't satisfy the grammar" in error
    assert error.isprintable()
    matcher.allowed()
    matcher.advance(encode("ab"))
    assert matcher.error == error


@pytest.mark.parametrize("token_id", [4096, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_an_error(grammars: Grammars, token_id: int) -> None:
    assert "out of range" in advanced(grammars, regex("ab"), [token_id]).error


@pytest.mark.parametrize("ended", [(5, 70), (1, 70)])
def test_text_behind_the_end_is_an_error(grammars: Grammars, ended: tuple[int, ...]) -> None:
    assert advanced(grammars, regex("a+"), [*encode("a"), *ended]).error


def test_an_ambiguous_grammar_meets_a_limit_before_its_steps_are_in_the_way_of_others(grammars: Grammars) -> None:
    matcher, slowest_s = grammars.matcher(lark('start: x\nx: "a" | x x | x x x\n')), 0.0
    (a,) = encode("a")
    for _ in range(400):
        began_s = thread_time()
        matcher.allowed()
        matcher.advance([a])
        slowest_s = max(slowest_s, thread_time() - began_s)
    assert "max is 500" in matcher.error
    assert "fewer properties" in matcher.error
    assert slowest_s < 0.15, "20 ms; 2,000 items make it 450"


def test_an_answer_that_leads_to_too_many_states_is_an_error_of_its_own_and_the_next_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=3000, verbose_errors=False)
    monkeypatch.setitem(grammar_module._LIMITS, GrammarKind.REGEX, limits)
    grammars, other = demo_grammars(), regex("other")
    innocent, (compiled, compiling) = grammars.matcher(other), compiles(monkeypatch, grammars)
    for seed in range(3):
        matcher = grammars.matcher(regex(GREEDY))
        assert matcher.error == ""
        assert allowed(matcher), "what its predecessor met is forgotten"
        compiled.clear()
        compiling.clear()
        with pytest.raises(AssertionError):
            walk(matcher, EOS, seed, most=2000)
        assert "too many states" in matcher.error
        grammars.matcher(regex(GREEDY))
        assert not compiled, "an engine's thread has the old one until another has compiled it"
        compiling.set()
        wait_until(lambda: not grammars._renewing, LIMIT_S, "the next one begins anew")
        assert compiled == [GREEDY]
        assert matcher.error
        assert not grammars._renewing, "it is no fault of the new one"
    assert innocent.error == ""
    assert is_there(grammars, other)


def test_an_answer_that_meets_a_limit_of_its_own_has_nothing_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one would meet it, too, and compiling may take seconds."""
    grammars, ambiguous = demo_grammars(), lark('start: x\nx: "a" | x x | x x x\n')
    matcher, kept = grammars.matcher(ambiguous), grammars.compile(ambiguous)
    compiled, _ = compiles(monkeypatch, grammars)
    matcher.advance([*encode("a")] * 400)
    late = advanced(grammars, ambiguous, encode("zz"))
    assert "max is 500" in matcher.error
    assert late.error
    assert grammars.compile(ambiguous) is kept
    assert not compiled


def compiles(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> tuple[list[str], threading.Event]:
    """The texts that are compiled from now on, other threads' while the event is set."""
    compile_, compiled, allowed_ = grammars._compile, list[str](), threading.Event()

    def noted(grammar: Grammar) -> llguidance.LLMatcher:
        if threading.current_thread() is not threading.main_thread():
            allowed_.wait(LIMIT_S)
        compiled.append(grammar.text)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", noted)
    return compiled, allowed_


def test_no_more_blanks_than_a_deep_structure_has_come_in_a_row(grammars: Grammars) -> None:
    (blank,) = encode(" ")
    matcher, num_blanks = advanced(grammars, ANY_OBJECT, encode("{")), 0
    while blank in allowed(matcher):
        matcher.advance([blank])
        num_blanks += 1
        assert num_blanks < 100, "a model may fill its answer with them"
    assert num_blanks == 80
    assert allowed(matcher), "it goes on with something else"
    pretty = json.dumps({"a": {"b": {"c": [1, {"d": None}]}}}, indent=4)
    assert set(EOS) <= allowed(advanced(grammars, ANY_OBJECT, encode(pretty)))


@pytest.mark.parametrize(("pattern", "most"), [("", 0), (" ?", 1)])
def test_a_schema_may_say_which_blanks_stand_between_its_parts(grammars: Grammars, pattern: str, most: int) -> None:
    (blank,) = encode(" ")
    matcher = advanced(
        grammars, schema(json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": pattern}})), encode("{")
    )
    for _ in range(most):
        assert blank in allowed(matcher)
        matcher.advance([blank])
    assert blank not in allowed(matcher)


def optional(num_properties: int, **more: object) -> Grammar:
    properties = {f"p{number}": {"type": "integer"} for number in range(num_properties)}
    return schema(json.dumps({"type": "object", "properties": properties, **more}))


def test_some_240_properties_of_an_object_may_be_optional(grammars: Grammars) -> None:
    for num_properties, is_fine in ((240, True), (260, False)):
        matcher = advanced(grammars, optional(num_properties), encode("{"))
        matcher.allowed()
        assert (not matcher.error) is is_fine
    assert "require more properties" in matcher.error


def test_a_grammar_of_which_no_answer_has_a_second_token_is_refused_at_once(grammars: Grammars) -> None:
    most = 400
    with pytest.raises(InvalidRequest, match=r"max is 1000; .*require more properties, or have fewer"):
        grammars.matcher(optional(most, required=[f"p{most - 1}"]))
    assert allowed(advanced(grammars, optional(most), encode("{}"))) == {*EOS}, "some answers of this one are whole"
    assert allowed(grammars.matcher(regex("|a"))) >= {*EOS}
    assert allowed(grammars.matcher(regex(""))) == {*EOS}


def test_the_latest_grammars_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10 < MOST_KEPT <= 64, "25 MB each, once their answers have led to as many states as may be"
    grammars = Grammars(demo_grammars().vocabulary, most_kept=3)
    a, b, c, d = map(regex, "abcd")
    assert not is_there(grammars, a)
    first = grammars.matcher(a)
    for grammar in (b, c, a, d):
        grammars.matcher(grammar)
    assert [is_there(grammars, grammar) for grammar in (a, b, c, d)] == [True, False, True, True]
    assert len(grammars._kept) == 3
    compiled: list[str] = []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: compiled.append(grammar.text) or compile_(grammar))
    for grammar in (a, c, b, a):
        grammars.matcher(grammar)
    assert compiled == ["b"]
    assert allowed(first) == {*encode("a")}, "who has one keeps it"


def test_one_that_is_held_stays_however_many_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        grammars = Grammars(demo_grammars().vocabulary, most_kept=2)
        held = await grammars.ahead(regex("held"))
        for number in range(5):
            await grammars.ahead(regex(f"{number}"))
        assert await grammars.ahead(regex("held")) is held
        failing(monkeypatch, grammars, "held", AssertionError("compiled twice"))
        assert allowed(grammars.matcher(regex("held")))
        for number in range(5):
            grammars.compile(regex(f"{number}"))
        del held
        assert not is_there(grammars, regex("held"))

    asyncio.run(body())


def test_no_more_is_kept_or_held_than_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grammar_module.MOST_TEXT == 2**22, "which compiled are 2 GiB at worst"
    monkeypatch.setattr(grammar_module, "MOST_TEXT", 40)
    monkeypatch.setattr(grammar_module, "LEAST_LENGTH", 10)

    async def body() -> None:
        grammars = demo_grammars()
        for letter in "abc":
            grammars.compile(regex(letter * 10))
        assert [grammar.text[0] for grammar in grammars._kept] == ["b", "c"], "a half for later"
        held = [await grammars.ahead(regex(letter * 10)) for letter in "bcde"]
        with pytest.raises(Overloaded, match="too long in all; send the request again"):
            await grammars.ahead(regex("f"))
        assert regex("f") not in grammars._kept
        await grammars.ahead(regex("bbbbbbbbbb"))
        held.clear()
        await grammars.ahead(regex("f"))

    asyncio.run(body())


def test_a_short_grammar_counts_for_what_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few characters may take as much as thousands."""
    assert most_bytes(regex("a")) == most_bytes(regex("a" * 8192)) == 2**22
    assert most_bytes(regex("a" * 65536)) == 2**25
    monkeypatch.setattr(grammar_module, "MOST_TEXT", 4 * grammar_module.LEAST_LENGTH)

    async def body() -> None:
        grammars = demo_grammars()
        for letter in "abc":
            grammars.compile(regex(letter))
        assert [grammar.text for grammar in grammars._kept] == ["b", "c"]
        held = [await grammars.ahead(regex(letter)) for letter in "abcd"]
        with pytest.raises(Overloaded):
            await grammars.ahead(regex("e"))
        assert len(held) == 4

    asyncio.run(body())


def test_a_machine_that_has_no_thread_left_to_renew_one_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    grammars, full = demo_grammars(), regex("full")
    held, matcher = grammars.compile(full), grammars.matcher(full)
    before = held.matcher
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        matcher._on_full()
    assert (held.matcher, matcher.error) == (before, "")
    matcher._on_full()
    wait_until(lambda: held.matcher is not before, LIMIT_S, "it is renewed then")
    wait_until(lambda: not grammars._renewing, LIMIT_S, "once")


def test_a_machine_that_has_no_thread_left_to_compile_one_says_that_it_is_not_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        grammars = demo_grammars()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Unavailable, match="can't start new thread"):
                await grammars.ahead(regex("a"))
        await grammars.ahead(regex("a"))

    asyncio.run(body())


def test_an_engine_of_which_nothing_is_kept_compiles_each_time() -> None:
    grammars = Grammars(demo_grammars().vocabulary, most_kept=0)
    assert allowed(grammars.matcher(regex("a"))) == {*encode("a")}
    assert not is_there(grammars, regex("a"))


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Grammars(Vocabulary(text, 10, (1,), ()))


def test_the_table_of_those_held_is_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it takes out those that have gone, and another thread may be going through it."""
    grammars, read = demo_grammars(), list[bool]()

    class Watched(WeakValueDictionary[Grammar, Compiled]):
        def get(self, key: Grammar, default: Any = None) -> Any:
            read.append(grammars._lock.locked())
            return super().get(key, default)

    monkeypatch.setattr(grammars, "_there", Watched())
    asyncio.run(grammars.ahead(regex("a")))
    grammars.matcher(regex("a"))
    assert len(read) >= 2
    assert all(read)


def test_many_who_want_one_grammar_at_once_have_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = demo_grammars(), list[str]()
    compile_ = grammars._compile

    def counted(grammar: Grammar) -> llguidance.LLMatcher:
        compiled.append(grammar.text)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", counted)

    async def body() -> None:
        first, *others = (asyncio.create_task(grammars.ahead(regex("a+"))) for _ in range(50))
        await asyncio.sleep(0)
        first.cancel()
        assert len(set(await asyncio.gather(*others))) == 1
        failed = await asyncio.gather(*(grammars.ahead(regex("(")) for _ in range(9)), return_exceptions=True)
        assert {type(error) for error in failed} == {InvalidRequest}
        assert not grammars._compiling

    asyncio.run(body())
    assert compiled == ["a+", "("]
