"""What a model thinks before it answers: finds it in an answer whose text comes in pieces, and writes grammars that begin
behind it.

    <think> what it thinks </think> the answer

The prompt may have begun the thought, and may have ended it: some templates write `<think>` behind the assistant's name, and
Qwen 3's writes a whole thought, of nothing, where the model is not to think. Blanks around a thought are no text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

import llguidance

from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.grammar import schema_in_lark
from jdisagg.text.lark import in_a_line, token_ranges
from jdisagg.text.marks import num_begun
from jdisagg.text.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
_BLANKS = " \n\r\t"
_MOST_BLANKS = 64  # that are held back before a thought and at its end; more are text


class Stage(Enum):
    """Where an answer stands."""

    MAY_THINK = auto()  # a thought may begin
    THINKS = auto()
    ANSWERS = auto()


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The tokens of a model; `special`: those that are special ones, whose text a reader has to be shown."""

    begin_id: int
    end_id: int
    special: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thought:
    """That may stand before an answer."""

    stage: Stage  # in which the prompt leaves it
    marks: ThoughtMarks
    takes_blanks: bool = True  # behind it, which are no text of the answer


@dataclass(frozen=True, slots=True)
class Piece:
    """Of an answer's text: what is new of the thought, and of the answer behind it. `before`: what is not of that, as it came:
    the thought, its marks and the blanks around it."""

    thought: str = ""
    answer: str = ""
    before: str = ""


def read_marks(tokenizer: Tokenizer) -> ThoughtMarks | None:
    """As this tokenizer has them; None: they are no tokens of it."""
    begin_id, end_id = tokenizer.token_id(BEGIN), tokenizer.token_id(END)
    if begin_id is None or end_id is None:
        return None
    special = tuple(mark for mark, each in ((BEGIN, begin_id), (END, end_id)) if each in tokenizer.special_ids)
    return ThoughtMarks(begin_id, end_id, special)


def stage_behind(prompt: str, continued: str | None = None) -> Stage:
    """Of an answer to `prompt`. `continued`: the text of the message that it goes on with."""
    if begun := (continued or "").lstrip(_BLANKS):
        return Stage.THINKS if begun.startswith(BEGIN) and END not in begun else Stage.ANSWERS
    end = prompt.rstrip(_BLANKS)
    return Stage.THINKS if end.endswith(BEGIN) else Stage.ANSWERS if end.endswith(END) else Stage.MAY_THINK


class ThoughtReader:
    """Of one answer. What it finds does not depend on how the text was cut."""

    def __init__(self, stage: Stage, *, takes_blanks: bool = True) -> None:
        """See Thought."""
        self.stage = stage
        self._takes_blanks = takes_blanks
        self.has_thought = self._may_repeat = stage is Stage.THINKS  # models write the mark that their prompt ends with again
        self._is_trimmed = stage is Stage.THINKS  # blanks that come now are no text
        self._held = ""  # not yet decided

    @property
    def is_over(self) -> bool:
        """All that comes is the answer's, as it is."""
        return self.stage is Stage.ANSWERS and not self._is_trimmed

    def push(self, text: str) -> Piece:
        """What `text` adds."""
        whole = text = self._held + text
        self._held = ""
        if self.stage is Stage.MAY_THINK:
            text = self._look_for_thought(text)
        elif self._may_repeat:
            text = self._without_mark(text)
        thought = ""
        if self.stage is Stage.THINKS:
            thought, text = self._think(text)
        answer = self._trimmed(text)
        return Piece(thought, answer, whole[: len(whole) - len(answer) - len(self._held)])

    def flush(self) -> Piece:
        """What is left at the end of the answer."""
        held, self._held = self._held, ""
        return Piece(thought=held, before=held) if self.stage is Stage.THINKS else Piece(answer=held)

    def _look_for_thought(self, text: str) -> str:
        """Returns what is to be read on, in the stage that this leads to."""
        begun = text.lstrip(_BLANKS)
        if len(text) - len(begun) > _MOST_BLANKS or not (begun.startswith(BEGIN) or BEGIN.startswith(begun)):
            self.stage = Stage.ANSWERS
            return text
        if not begun.startswith(BEGIN):
            self._held = text
            return ""
        self.stage, self.has_thought, self._is_trimmed = Stage.THINKS, True, True
        return begun.removeprefix(BEGIN)

    def _without_mark(self, text: str) -> str:
        begun = text.lstrip(_BLANKS)
        self._may_repeat = begun != BEGIN and BEGIN.startswith(begun)
        if self._may_repeat:
            self._held = begun
            return ""
        return begun.removeprefix(BEGIN)

    def _think(self, text: str) -> tuple[str, str]:
        """What is new of the thought, and the text behind it."""
        text = self._trimmed(text)
        at = text.find(END)
        end = len(text) - num_begun(text, END) if at < 0 else at
        told = text[: max(len(text[:end].rstrip(_BLANKS)), end - _MOST_BLANKS)]
        if at < 0:
            self._held += text[len(told) :]
            return told, ""
        self.stage, self._is_trimmed = Stage.ANSWERS, self._takes_blanks
        return told, text[at + len(END) :]

    def _trimmed(self, text: str) -> str:
        """Without the blanks that it begins with, where they are no text."""
        if self._is_trimmed:
            text = text.lstrip(_BLANKS)
            self._is_trimmed = not text
        return text


def behind_thought(grammar: Grammar, thought: Thought, never: Collection[int]) -> Grammar:
    """Of an answer that is of `grammar` behind a thought of any tokens but those of `never`; `grammar` itself where nothing is
    thought, or all tokens are to be of it."""
    if thought.stage is Stage.ANSWERS or grammar.kind is GrammarKind.BAD_WORDS:
        return grammar
    begin_id, end_id = thought.marks.begin_id, thought.marks.end_id
    blanks = r" /[ \n\r\t]{1,8}/?" if thought.takes_blanks else ""
    text = f"<[^{token_ranges({*never, end_id} - {begin_id})}]>* <[{end_id}]>{blanks}"
    before = text if thought.stage is Stage.THINKS else f"(<[{begin_id}]> {text})?"
    return Grammar(GrammarKind.LARK, f"answer: {_in_lark(grammar)}\nstart: {before} answer")


def _in_lark(grammar: Grammar) -> str:
    """What a rule of it is."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"%json {in_a_line(schema_in_lark(json.loads(grammar.text)))}"
        case GrammarKind.REGEX:
            [read] = json.loads(llguidance.LLMatcher.grammar_from_regex(grammar.text))["grammars"]
            return read["lark_grammar"].removeprefix("start: ")
        case _:
            return f"%lark {{{grammar.text}\n}}"
