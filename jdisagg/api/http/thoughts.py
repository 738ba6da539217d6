"""What a model thinks, beside its answer: which fields say how it is shown, and what makes a message of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Conversion
from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.call_grammars import TOOLS
from jdisagg.api.http.calls import MessageReader
from jdisagg.api.http.continued import CONTINUES
from jdisagg.api.http.grammars import ALLOWED_TOKENS, GRAMMAR, RESPONSE_FORMAT
from jdisagg.api.http.messages import THOUGHT_FIELDS
from jdisagg.api.http.template_variables import is_excluded
from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.core.requests import FinishReason, Grammar, GrammarKind
from jdisagg.text.thoughts import BEGIN, END, Piece, Stage, Thought, ThoughtMarks, ThoughtReader, read_marks, stage_behind
from jdisagg.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Shown(Enum):
    """Where clients find a thought."""

    BESIDE = auto()  # in fields of its own
    NOWHERE = auto()
    IN_CONTENT = auto()


SHOWN = {  # by Groq's and llama.cpp's `reasoning_format`
    "auto": None,
    **dict.fromkeys(("parsed", "deepseek"), Shown.BESIDE),
    **dict.fromkeys(("none", "raw"), Shown.IN_CONTENT),
    "hidden": Shown.NOWHERE,
}


@dataclass(frozen=True, slots=True)
class Thinking:
    """Of the answers to one chat."""

    thought: Thought
    shown: Shown

    @property
    def may_be(self) -> bool:
        """The answer may hold a thought."""
        return self.thought.stage is not Stage.ANSWERS


def choose_marks(name: str, tokenizer: Tokenizer) -> ThoughtMarks | None:
    """`name`: as `--reasoning-parser` has it; None: thoughts stay in content. Logs what was found. Raises ConfigError where the
    model has no such marks."""
    marks = None if name == "none" else read_marks(tokenizer)
    if name == "auto" and (tokenizer.chat is None or not tokenizer.chat.names(END)):
        marks = None  # others of its family think
    if marks is not None:
        log.info("thoughts are read between %s and %s (to leave them in content: --reasoning-parser none)", BEGIN, END)
    elif name not in ("none", "auto"):
        told = f"{BEGIN} and {END} are no tokens of this model, so nothing tells where its thoughts end; leave it out"
        raise ConfigError(f"--reasoning-parser: got {name!r}, but {told}")
    return marks


def read_thinking(body: Body, edge: Edge, prompt: str, grammar: Grammar | None) -> Thinking | None:
    """None: nothing is looked for. `grammar`: what the answer has to be, which begins behind the thought, and where a client
    wrote it itself, there with its first character. Raises InvalidRequest for fields that contradict each other, or ask for a
    thought to be told from the answer where it cannot be, and for a thought that is to be continued and is no content."""
    asked = _asked(body)
    name, shown = next(iter(asked.items()), ("", Shown.BESIDE))
    for other, wanted in asked.items():
        if wanted is not shown:
            raise InvalidRequest.of(other, f"says the opposite of {name}; leave out one of the two")
    if edge.thought_marks is not None:
        continued = _continued(body)
        is_written = grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA
        takes_blanks = not is_written or body.names.get(GRAMMAR) in (TOOLS, RESPONSE_FORMAT)
        return Thinking(Thought(stage_behind(prompt, continued), edge.thought_marks, takes_blanks), shown)
    if name and shown is not Shown.IN_CONTENT:
        raise InvalidRequest.of(name, "what this model thinks stays in content; leave it out, or see --reasoning-parser")
    return None


def as_shown(conversion: Conversion, thinking: Thinking | None, body: Body) -> Conversion:
    """With what this needs: a reader sees all marks, and a grammar, but for one of all tokens, begins behind the thought."""
    if thinking is None or not thinking.may_be:
        return conversion
    thought = None if body.names.get(GRAMMAR) == ALLOWED_TOKENS else thinking.thought
    return replace(conversion, shown=conversion.shown + thinking.thought.marks.special, thought=thought)


class ThoughtsReader:
    """Of one choice: what `inner` makes of its answer, and the thought before that."""

    def __init__(self, inner: MessageReader, thinking: Thinking) -> None:
        self.is_text = inner.is_text
        self._inner = inner
        self._reader = ThoughtReader(thinking.thought.stage, takes_blanks=thinking.thought.takes_blanks)
        self._shown = thinking.shown
        self._end_id = thinking.thought.marks.end_id
        self._num_tokens = 0  # not yet told of
        self._is_counted = False

    @property
    def is_plain(self) -> bool:
        """See TextReader."""
        return self._inner.is_plain and self._reader.is_over

    @property
    def nothing(self) -> str | None:
        """See CallsReader."""
        return None if self._reader.stage is Stage.THINKS else self._inner.nothing

    @property
    def outcome(self) -> str | None:
        """See CallsReader."""
        return self._inner.outcome

    def count(self, token_ids: Sequence[int]) -> int:
        """How many more tokens are known to be of the thought, with its marks, now that these have come, and their text has."""
        if not self._is_counted:
            has_end = self._end_id in token_ids
            self._num_tokens += token_ids.index(self._end_id) + 1 if has_end else len(token_ids)
            self._is_counted = has_end or self._reader.stage is Stage.ANSWERS  # its end may be written in letters
        if not self._reader.has_thought:
            return 0
        num_tokens, self._num_tokens = self._num_tokens, 0
        return num_tokens

    def message(self, text: str) -> dict[str, Any]:
        """See TextReader; with the thought."""
        piece = self._read(text, is_last=True)
        message = self._inner.message(piece.answer)
        content = message.get("content") or ""
        if self._shown is Shown.IN_CONTENT:
            content = piece.before + content
        if self._reader.has_thought:
            message["content"] = content or None
        return message | self._told(piece)

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """See TextReader."""
        piece = self._read(text, is_last=is_last)
        news = self._inner.news(piece.answer, is_last=is_last)
        if self._shown is Shown.IN_CONTENT and piece.before:
            news["content"] = piece.before + (news.get("content") or "")
        return self._told(piece) | news

    def finish_reason(self, finish: FinishReason) -> str:
        """See TextReader."""
        return self._inner.finish_reason(finish)

    def _read(self, text: str, *, is_last: bool) -> Piece:
        first = self._reader.push(text)
        rest = self._reader.flush() if is_last else Piece()
        return Piece(first.thought + rest.thought, first.answer + rest.answer, first.before + rest.before)

    def _told(self, piece: Piece) -> dict[str, Any]:
        return dict.fromkeys(THOUGHT_FIELDS, piece.thought) if piece.thought and self._shown is Shown.BESIDE else {}


ChatReader = MessageReader | ThoughtsReader


@dataclass(frozen=True, slots=True)
class Readers:
    """Of the answers to one chat."""

    make: Callable[[], ChatReader]
    find_thoughts: bool  # where there is one

    def nothing_thought(self) -> dict[str, None]:
        """The fields of a message without a thought: clients look for them where models may think."""
        return dict.fromkeys(THOUGHT_FIELDS) if self.find_thoughts else {}


def with_thoughts(make: Callable[[], MessageReader], thinking: Thinking | None) -> Readers:
    """Those that `make` makes, for a chat of which `thinking` was read."""
    if thinking is None or not thinking.may_be:
        return Readers(make, thinking is not None)
    return Readers(lambda: ThoughtsReader(make(), thinking), True)


def _asked(body: Body) -> dict[str, Shown]:
    """By the fields that say it."""
    form = body.get("reasoning_format")
    if form is not None and not (isinstance(form, str) and form in SHOWN):
        raise wrong_type("reasoning_format", f"one of {', '.join(SHOWN)}", form)
    asked = {
        "include_reasoning": None if body.boolean("include_reasoning", True) else Shown.NOWHERE,
        "separate_reasoning": None if body.boolean("separate_reasoning", True) else Shown.IN_CONTENT,
        "reasoning_format": None if form is None else SHOWN[form],
        "reasoning": Shown.NOWHERE if is_excluded(body) else None,
    }
    return {name: shown for name, shown in asked.items() if shown is not None}


def _continued(body: Body) -> str | None:
    """The text that the answer goes on with; None where it begins a message."""
    if not body.boolean(CONTINUES):
        return None
    message = body.objects("messages")[-1]
    content = message.get("content") or ""
    text = "".join(map(_text, content if isinstance(content, list) else [content]))
    if not text.strip() and any(isinstance(thought := message.get(name), str) and thought for name in THOUGHT_FIELDS):
        told = f"templates show no thought that has no answer yet; to go on with it, send it as content, {BEGIN} first"
        raise InvalidRequest.of(CONTINUES, told)
    return text


def _text(part: Any) -> str:
    """Of content, or of one of its parts, which has it by the name of its type."""
    return part if isinstance(part, str) else str(part.get(part.get("type"), part.get("text", "")))
