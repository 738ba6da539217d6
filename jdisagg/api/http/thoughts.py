"""What a model thinks, beside its answer: which fields say how it is shown, and what makes a message of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http.body import Body, wrong_type
from jdisagg.api.http.calls import MessageReader
from jdisagg.api.http.continued import CONTINUES
from jdisagg.api.http.grammars import ALLOWED_TOKENS, GRAMMAR
from jdisagg.api.http.messages import THOUGHT_FIELDS
from jdisagg.api.http.template_variables import is_excluded
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import FinishReason, SamplingParams
from jdisagg.text.thoughts import (
    BEGIN,
    END,
    Piece,
    Stage,
    ThoughtMarks,
    ThoughtReader,
    behind_thought,
    read_marks,
    stage_behind,
)
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

    stage: Stage
    shown: Shown
    marks: ThoughtMarks

    @property
    def is_split(self) -> bool:
        """A thought is not part of the content."""
        return self.stage is not Stage.ANSWERS and self.shown is not Shown.IN_CONTENT


def choose_marks(name: str, tokenizer: Tokenizer) -> ThoughtMarks | None:
    """`name`: as `--reasoning-parser` has it; None: thoughts stay in content. Logs what was found."""
    marks = read_marks(tokenizer)
    if name == "none" or (name == "auto" and (marks.begin_id is None or marks.end_id is None)):
        return None
    log.info("thoughts are read between %s and %s (to leave them in content: --reasoning-parser none)", BEGIN, END)
    return marks


def read_thinking(body: Body, edge: Edge, prompt: str) -> Thinking | None:
    """None: nothing is looked for. Raises InvalidRequest for fields that contradict each other, or ask for a thought to be told
    from the answer where it cannot be."""
    told = _told(body)
    for name, shown in list(told.items())[1:]:
        if shown is not next(iter(told.values())):
            raise InvalidRequest.of(name, f"says the opposite of {next(iter(told))}; leave out one of the two")
    name, shown = next(iter(told.items()), ("", Shown.BESIDE))
    if edge.thought_marks is not None:
        return Thinking(stage_behind(prompt, _continued(body)), shown, edge.thought_marks)
    if name and shown is not Shown.IN_CONTENT:
        raise InvalidRequest.of(name, "what this model thinks stays in content; leave it out, or see --reasoning-parser")
    return None


def with_thought(sampling: SamplingParams, thinking: Thinking | None, body: Body, edge: Edge) -> SamplingParams:
    """`sampling` that was read of a chat: what the answer has to be begins behind the thought. Raises InvalidRequest where it
    is too long by that."""
    if sampling.grammar is None or thinking is None or body.names.get(GRAMMAR) == ALLOWED_TOKENS:
        return sampling
    grammar = behind_thought(sampling.grammar, thinking.stage, thinking.marks, edge.tokenizer.special_ids)
    if (num_bytes := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        told = f"with the thought before it, it may have at most {MAX_GRAMMAR_BYTES} bytes; got {num_bytes}; shorten it"
        raise InvalidRequest.of(body.names[GRAMMAR], told)
    return replace(sampling, grammar=grammar)


class ThoughtsReader:
    """Of one choice: what `inner` makes of its answer, and the thought before that."""

    def __init__(self, inner: MessageReader, thinking: Thinking) -> None:
        self.is_text = inner.is_text
        self.nothing = inner.nothing
        self._inner = inner
        self._reader = ThoughtReader(thinking.stage)
        self._is_shown = thinking.shown is Shown.BESIDE
        self._end_id = thinking.marks.end_id
        self._num_tokens = 0  # not yet told of
        self._is_counted = False

    @property
    def is_plain(self) -> bool:
        """See TextReader."""
        return self._inner.is_plain and self._reader.is_over

    @property
    def outcome(self) -> str | None:
        """See CallsReader."""
        return self._inner.outcome

    @property
    def is_countable(self) -> bool:
        """The end of the thought is a token."""
        return self._end_id is not None

    def count(self, token_ids: Sequence[int]) -> int:
        """How many more tokens are known to be of the thought, with its marks, now that these have come, and their text has."""
        if not self._is_counted:
            self._is_counted = self._end_id in token_ids
            self._num_tokens += token_ids.index(self._end_id) + 1 if self._is_counted else len(token_ids)
        if not self._reader.has_thought:
            return 0
        num_tokens, self._num_tokens = self._num_tokens, 0
        return num_tokens

    def message(self, text: str) -> dict[str, Any]:
        """See TextReader; with the thought."""
        first, rest = self._reader.push(text), self._reader.flush()
        thought, answer = first.thought + rest.thought, first.answer + rest.answer
        message = self._inner.message(answer)
        if thought or self._reader.has_thought:
            message["content"] = message.get("content") or None
        return message | self._told(thought)

    def news(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """See TextReader."""
        first = self._reader.push(text)
        rest = self._reader.flush() if is_last else Piece()
        news = self._inner.news(first.answer + rest.answer, is_last=is_last)
        return self._told(first.thought + rest.thought) | news

    def finish_reason(self, finish: FinishReason) -> str:
        """See TextReader."""
        return self._inner.finish_reason(finish)

    def _told(self, thought: str) -> dict[str, Any]:
        return dict.fromkeys(THOUGHT_FIELDS, thought) if thought and self._is_shown else {}


ChatReader = MessageReader | ThoughtsReader


def with_thoughts(make: Callable[[], MessageReader], thinking: Thinking | None) -> Callable[[], ChatReader]:
    """What makes readers for the answers to a chat, of which `thinking` was read."""
    if thinking is None or not thinking.is_split:
        return make
    return lambda: ThoughtsReader(make(), thinking)


def _told(body: Body) -> dict[str, Shown]:
    """By the fields that say it."""
    form = body.get("reasoning_format")
    if form is not None and not (isinstance(form, str) and form in SHOWN):
        raise wrong_type("reasoning_format", f"one of {', '.join(SHOWN)}", form)
    told = {
        "include_reasoning": None if body.boolean("include_reasoning", True) else Shown.NOWHERE,
        "separate_reasoning": None if body.boolean("separate_reasoning", True) else Shown.IN_CONTENT,
        "reasoning_format": None if form is None else SHOWN[form],
        "reasoning": Shown.NOWHERE if is_excluded(body) else None,
    }
    return {name: shown for name, shown in told.items() if shown is not None}


def _continued(body: Body) -> str | None:
    """The text that the answer goes on with; None where it begins a message."""
    if not body.boolean(CONTINUES):
        return None
    content = body.objects("messages")[-1].get("content") or ""
    last = content[-1] if isinstance(content, list) else content
    return last if isinstance(last, str) else str(last.get("text", ""))
