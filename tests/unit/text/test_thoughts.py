"""What a model thinks is told from its answer however the text is cut, and grammars begin behind it."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st

from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.bad_words import without
from jdisagg.text.grammar import Grammars
from jdisagg.text.thoughts import (
    BEGIN,
    END,
    Stage,
    Thought,
    ThoughtMarks,
    ThoughtReader,
    behind_thought,
    read_marks,
    stage_behind,
)
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.text.grammar_rig import advanced, allowed, vocabulary
from tests.unit.text.tiny_tokenizer import train_byte_level

EOS = 1
TEXTS = [  # the stage in which an answer begins, all of it, its thought and the rest
    (Stage.MAY_THINK, "<think>\nwhy?\n</think>\n\nfox", "why?", "fox"),
    (Stage.MAY_THINK, "\n <think>why?</think>fox\n", "why?", "fox\n"),
    (Stage.MAY_THINK, "<think></think>fox", "", "fox"),
    (Stage.MAY_THINK, " fox <think>x</think>", "", " fox <think>x</think>"),
    (Stage.MAY_THINK, "<thin", "", "<thin"),
    (Stage.MAY_THINK, "", "", ""),
    (Stage.MAY_THINK, " \n", "", " \n"),
    (Stage.MAY_THINK, f"{' ' * 65}<think>x</think>", "", f"{' ' * 65}<think>x</think>"),
    (Stage.MAY_THINK, "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
    (Stage.MAY_THINK, "<think>no end </thin", "no end </thin", ""),
    (Stage.MAY_THINK, "<think>no end \n", "no end \n", ""),
    (Stage.MAY_THINK, f"<think>a{' ' * 70}</think>b", f"a{' ' * 6}", "b"),
    (Stage.THINKS, "why?\n\nso.\n</think>\n\n  fox", "why?\n\nso.", "fox"),
    (Stage.THINKS, "\n<think>\nwhy?</think>fox", "why?", "fox"),
    (Stage.THINKS, "</think>fox", "", "fox"),
    (Stage.THINKS, "<a>why?</think>", "<a>why?", ""),
    (Stage.THINKS, "why? <think>x", "why? <think>x", ""),
    (Stage.ANSWERS, "<think>x</think> y", "", "<think>x</think> y"),
]


def read(stage: Stage, parts: list[str], *, takes_blanks: bool = True) -> tuple[str, str]:
    reader = ThoughtReader(stage, takes_blanks=takes_blanks)
    pieces = [*map(reader.push, parts), reader.flush()]
    thought, answer, before = ("".join(getattr(piece, name) for piece in pieces) for name in ("thought", "answer", "before"))
    assert before + answer == "".join(parts), "all of the text is before the answer or the answer"
    return thought, answer


@pytest.mark.parametrize(("stage", "text", "thought", "answer"), TEXTS)
def test_a_thought_ends_at_its_mark_and_blanks_around_it_are_no_text(
    stage: Stage, text: str, thought: str, answer: str
) -> None:
    assert read(stage, [text]) == (thought, answer)
    assert read(stage, list(text)) == (thought, answer)


def test_blanks_behind_a_thought_are_the_answers_where_they_may_be() -> None:
    for parts in ([f"why?\n{END}\n fox"], list(f"why?\n{END}\n fox")):
        assert read(Stage.THINKS, parts, takes_blanks=False) == ("why?", "\n fox")


@hypothesis.given(
    st.sampled_from(Stage), st.lists(st.sampled_from([BEGIN, END, "<", "think>", "</th", " ", "\n" * 40, "fox", ""])), st.data()
)
def test_what_is_found_does_not_depend_on_how_the_text_was_cut(stage: Stage, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(stage, cut) == read(stage, [text])


def test_a_thought_goes_out_as_it_comes() -> None:
    reader = ThoughtReader(Stage.THINKS)
    assert [reader.push(part).thought for part in ("why", "? ", "so", " </")] == ["why", "?", " so", ""]
    assert not reader.is_over
    assert reader.push("think>fox").answer == "fox"
    assert reader.is_over


@pytest.mark.parametrize(
    ("prompt", "continued", "stage"),
    [
        ("<|assistant|>", None, Stage.MAY_THINK),
        ("<|assistant|><think>\n", None, Stage.THINKS),
        ("<|assistant|><think>\n\n</think>\n\n", None, Stage.ANSWERS),
        ("what is <think>?<|assistant|>", None, Stage.MAY_THINK),
        ("<|assistant|>The", "The", Stage.ANSWERS),
        ("<|assistant|>", " ", Stage.MAY_THINK),
        ("<|assistant|><think>\n", " ", Stage.THINKS),
        ("<|assistant|>Write <think> to", "Write <think> to", Stage.ANSWERS),
        ("<|assistant|><think>a</think>b <think>", "<think>a</think>b <think>", Stage.ANSWERS),
        ("<|assistant|><think>I was", "<think>I was", Stage.THINKS),
        ("<|assistant|><think>I was</think>The", "<think>I was</think>The", Stage.ANSWERS),
    ],
)
def test_a_prompt_says_whether_its_answer_begins_in_a_thought(prompt: str, continued: str | None, stage: Stage) -> None:
    assert stage_behind(prompt, continued) is stage


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The marks are tokens, and no special ones, as Qwen's and DeepSeek's are."""
    directory: Path = train_byte_level(tmp_path_factory.mktemp("thinking"))
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<|user|>"])
    backend.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in (BEGIN, END)])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def grammars(thinking: Tokenizer) -> Grammars:
    return Grammars(vocabulary(thinking, (EOS,)))


GRAMMARS = [  # and what is of it, and what is not
    (
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
        '{"a": 1}',
        "1",
    ),
    (Grammar(GrammarKind.REGEX, 'a/b\\/[c"]\n(q|x)'), 'a/b/"\nq', "a/c"),
    (Grammar(GrammarKind.LARK, 'start: "a" b // no }\nb: /[}x]+/\n# the end'), "a}x", "b"),
    (Grammar(GrammarKind.LARK, 'start: "a"\nanswer: "b"\nTHOUGHT_BLANKS: "c"'), "a", "b"),
]


@pytest.mark.parametrize("stage", [Stage.THINKS, Stage.MAY_THINK])
@pytest.mark.parametrize("given", GRAMMARS)
def test_a_grammar_begins_behind_the_thought(
    thinking: Tokenizer, grammars: Grammars, given: tuple[Grammar, str, str], stage: Stage
) -> None:
    grammar, good, bad = given
    marks = marks_of(thinking)
    takes_blanks = grammar.kind is GrammarKind.JSON_SCHEMA
    whole = behind_thought(grammar, Thought(stage, marks, takes_blanks), thinking.special_ids)
    begun = "" if stage is Stage.THINKS else BEGIN

    def ids(text: str) -> tuple[int, ...]:
        return thinking.encode(text, add_special_tokens=False)

    matcher = grammars.matcher(whole)
    for token_id in ids(f'{begun}the "quick"\n{{}} fox'):
        assert token_id in allowed(matcher)
        matcher.advance([token_id])
    assert marks.end_id in allowed(matcher)
    assert not allowed(matcher) & (thinking.special_ids | {EOS}), "a thought has an end, and no other message in it"
    for blanks in ("", "\n\n"):
        ended = advanced(grammars, whole, ids(f"{begun}fox{END}{blanks}{good}"))
        assert (ended.error == "") == (not blanks or takes_blanks)
        assert ended.error or EOS in allowed(ended)
    assert advanced(grammars, whole, ids(f"{begun}fox{END}{bad}")).error
    at_once = advanced(grammars, whole, ids(good))
    assert (EOS in allowed(at_once)) == (stage is Stage.MAY_THINK), "a model may think, or has begun to"


def test_marks_that_are_special_tokens_may_be_where_a_thought_is(tmp_path: Path) -> None:
    directory = train_byte_level(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([BEGIN, END])
    backend.save(str(directory / "tokenizer.json"))
    special = Tokenizer.from_directory(directory)
    marks, grammar = marks_of(special), Grammar(GrammarKind.REGEX, "fox")
    matcher = Grammars(vocabulary(special, (EOS,))).matcher(
        behind_thought(grammar, Thought(Stage.MAY_THINK, marks), special.special_ids)
    )
    assert marks.begin_id in allowed(matcher)
    matcher.advance([marks.begin_id])
    assert {marks.begin_id, marks.end_id} <= allowed(matcher)
    matcher.advance([marks.end_id, *special.encode("fox", add_special_tokens=False)])
    assert (matcher.error, EOS in allowed(matcher)) == ("", True)


def test_where_nothing_is_thought_a_grammar_stays_as_it_is(thinking: Tokenizer) -> None:
    assert behind_thought(GRAMMARS[0][0], Thought(Stage.ANSWERS, marks_of(thinking)), ()) is GRAMMARS[0][0]
    words = without(("fox",))
    assert behind_thought(words, Thought(Stage.THINKS, marks_of(thinking)), ()) is words, "they are none of the thought either"


@pytest.mark.parametrize("stage", [Stage.THINKS, Stage.MAY_THINK])
def test_an_object_may_have_as_many_optional_properties_as_without_a_thought(
    thinking: Tokenizer, grammars: Grammars, stage: Stage
) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    marks = marks_of(thinking)
    whole = behind_thought(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), Thought(stage, marks), thinking.special_ids)
    begun = [5, marks.end_id] if stage is Stage.THINKS else []
    place = advanced(grammars, whole, [*begun, *thinking.encode('{"p3"', add_special_tokens=False)])
    place.allowed()
    assert place.error == ""
    [answer, start] = whole.text.split("\n")
    for own in (
        f"{whole.text}\nx: %json {{}}",
        f'{answer} | "a" | %json {{}}\n{start}',
        f'{answer}\nstart: ("x" | /a+/)* answer',
    ):
        place = grammars.matcher(Grammar(GrammarKind.LARK, own))
        if "<[^" in own:
            place.advance(begun)
        place.advance(thinking.encode('{"p3"', add_special_tokens=False))
        place.allowed()
        assert "Current row has" in place.error, "what a client wrote in Lark has that limit"


@pytest.mark.parametrize("text", ["a\\", "a\\\n", "(?i)a/[/]", "\x85\u2028"])
def test_expressions_of_any_form_are_served_behind_a_thought(thinking: Tokenizer, grammars: Grammars, text: str) -> None:
    grammar = Grammar(GrammarKind.REGEX, text)
    alone, marks = grammars.matcher(grammar), marks_of(thinking)
    behind = grammars.matcher(behind_thought(grammar, Thought(Stage.THINKS, marks, False), thinking.special_ids))
    behind.advance([marks.end_id])
    assert allowed(behind) == allowed(alone), "the same answers"


def test_marks_are_known_where_both_are_tokens_and_special_ones_are_named(thinking: Tokenizer, tmp_path: Path) -> None:
    assert marks_of(thinking).special == ()
    directory = train_byte_level(tmp_path)
    assert read_marks(Tokenizer.from_directory(directory)) is None
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for mark, wanted in ((END, None), (BEGIN, (BEGIN, END))):
        backend.add_special_tokens([mark])
        backend.save(str(directory / "tokenizer.json"))
        marks = read_marks(Tokenizer.from_directory(directory))
        assert (marks and marks.special) == wanted
    assert marks is not None
    assert (backend.id_to_token(marks.begin_id), backend.id_to_token(marks.end_id)) == (BEGIN, END)


def marks_of(tokenizer: Tokenizer) -> ThoughtMarks:
    marks = read_marks(tokenizer)
    assert marks is not None
    return marks
