"""The text side of one choice: engine outputs in, text deltas out; and what all deltas of a request add up to."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from jdisagg.api.generation.intake import Job
from jdisagg.api.in_order import LONG_POSITIONS
from jdisagg.core.requests import FinishReason, Output, Provenance, TokenLogprob
from jdisagg.text.detokenize import Detokenizer
from jdisagg.text.stops import StopStrings
from jdisagg.text.tokenizer import Tokenizer

T = TypeVar("T")

MOST_JOINED = 64  # tokens of one delta that several have become: it goes out at once, log-probabilities and all
MOST_TEXTS = 512  # of one choice, until they are joined: each takes more room than its few characters
_MIN_LOGPROB = -9999.0  # JSON has no -Infinity, which a token that was filtered out has


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredToken:
    """One token's log-probability (nats; None for the first prompt token) and where its text begins in the choice's text."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first
    text_offset: int = 0  # characters


@dataclass(kw_only=True, slots=True)
class Delta:
    """What is new in one choice. The last one of a choice has `finish` set. Never changed; see Output why it is not frozen."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    prompt_logprobs: tuple[ScoredToken, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None  # the stop string or id of `stop_token_ids` that ended it; None for EOS
    provenance: Provenance | None = None
    cached_tokens: int = 0
    fingerprint: str | None = None  # as in Output


def in_fewer(items: Sequence[Delta | T]) -> Sequence[Delta | T]:
    """The same with deltas of one choice joined, up to MOST_JOINED tokens. Nothing passes what is no delta."""
    if len(items) == 1:
        return items
    fewer, latest = list[Delta | T](), dict[int, tuple[int, Delta]]()  # by choice: its latest delta, and where it is
    for item in items:
        if not isinstance(item, Delta):
            latest.clear()
            fewer.append(item)
            continue
        at, before = latest.get(item.index, (0, None))
        if before is not None and len(before.token_ids) + len(item.token_ids) <= MOST_JOINED:
            fewer[at] = joined = _join(before, item)
        else:
            at, joined = len(fewer), item
            fewer.append(item)
        latest[item.index] = at, joined
    return fewer


def _join(first: Delta, then: Delta) -> Delta:
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
        provenance=then.provenance or first.provenance,
        cached_tokens=max(first.cached_tokens, then.cached_tokens),
        fingerprint=then.fingerprint or first.fingerprint,
    )


class ChoiceText:
    """Detokenizes one choice, looks for stop strings and trims. Tokens of a stop string count as generated."""

    def __init__(self, tokenizer: Tokenizer, job: Job, index: int) -> None:
        """Choice `index` of `job`."""
        request = job.requests[index]
        self._index = index
        self._prompt_token_ids = request.prompt_token_ids
        self._echo_text = None if job.echo_texts is None else job.echo_texts[index // job.n]
        self._min_tokens = request.sampling.min_tokens  # no stop string ends in that many first tokens
        self._stop_token_ids = request.sampling.stop_token_ids  # the model's own end is not one that `Delta.stop` tells
        self._scores_only = job.scores_only
        self._tokenizer = tokenizer
        self._prompt_detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            skip_special_tokens=job.conversion.skip_special_tokens,
            before=request.prompt_token_ids,
            shown=job.conversion.shown,
        )
        self._stops = StopStrings(job.stop, are_shown=job.conversion.shows_stop)
        self._num_tokens = 0
        self._num_characters = len(self._echo_text or "")

    def absorb(self, output: Output) -> Delta:
        """Turn one engine output into a delta; after a delta with `finish` no more may be absorbed."""
        text = self._echo_text or ""
        self._echo_text = None
        prompt_logprobs = self._score_prompt(output.prompt_logprobs, text) if output.prompt_logprobs is not None else ()
        if self._scores_only:
            finish = None if output.finish is None else FinishReason.LENGTH
            text += self._detokenizer.flush() if finish is not None else ""
            return self._delta(output, text, num_tokens=0, scored=(), prompt_logprobs=prompt_logprobs, finish=finish)
        scored: list[ScoredToken] = []
        used = 0
        for used, token_id in enumerate(output.token_ids, start=1):
            if output.logprobs is not None:
                scored.append(_score(output.logprobs[used - 1], self._num_characters))
            ends_here = output.stop_token_id is not None and used == len(output.token_ids)
            is_hidden = ends_here and not self._stops.are_shown
            text += self._advance("" if is_hidden else self._detokenizer.push(token_id))
            if self._stops.matched is not None:
                break
        finish = output.finish
        if finish is not None and self._stops.matched is None:
            text += self._advance(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.matched is not None:
            finish = FinishReason.STOP
        return self._delta(output, text, num_tokens=used, scored=tuple(scored), prompt_logprobs=prompt_logprobs, finish=finish)

    def rest(self) -> Delta | None:
        """What is withheld of the text of its tokens, if anything, for a choice that ends here; no more may be absorbed."""
        if not self._num_tokens:
            return None
        text = self._advance(self._detokenizer.flush()) + self._stops.flush()
        return Delta(index=self._index, text=text) if text else None

    def _advance(self, text: str) -> str:
        """Count a token and its text; returns what may be shown."""
        self._num_tokens += 1
        self._num_characters += len(text)
        return self._stops.push(text, may_end=self._num_tokens > self._min_tokens)

    def _delta(
        self,
        output: Output,
        text: str,
        *,
        num_tokens: int,
        scored: tuple[ScoredToken, ...],
        prompt_logprobs: tuple[ScoredToken, ...],
        finish: FinishReason | None,
    ) -> Delta:
        stop: str | int | None = self._stops.matched
        if stop is None and not self._scores_only and output.stop_token_id in self._stop_token_ids:
            stop = output.stop_token_id
        return Delta(
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_tokens],
            logprobs=scored,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop=stop,
            provenance=output.provenance,
            cached_tokens=output.cached_tokens,
            fingerprint=output.fingerprint,
        )

    def _score_prompt(self, logprobs: Sequence[TokenLogprob | None], echoed: str) -> tuple[ScoredToken, ...]:
        """With offsets into `echoed`, where a special token has its name unless it was put around the text or is not shown."""
        scored, offset = [], 0
        for token_id, entry in zip(self._prompt_token_ids, logprobs, strict=True):
            if entry is None:
                scored.append(ScoredToken(token_id=token_id, logprob=None, text_offset=offset))
            else:
                scored.append(_score(entry, offset))
            is_special = token_id in self._tokenizer.special_ids
            if not is_special or echoed.startswith(self._tokenizer.token_text(token_id), offset):
                offset += len(self._prompt_detokenizer.push(token_id))
        return tuple(scored)


def _score(entry: TokenLogprob, offset: int) -> ScoredToken:
    top = tuple((token_id, max(logprob, _MIN_LOGPROB)) for token_id, logprob in entry.top)
    return ScoredToken(token_id=entry.token_id, logprob=max(entry.logprob, _MIN_LOGPROB), top=top, text_offset=offset)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one client request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # of the completion; None = not told from the rest


@dataclass(kw_only=True, slots=True)
class ChoiceResult:
    """The whole of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=partial(array, "i"))
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None
    provenance: Provenance | None = None
    cached_tokens: int | None = None  # of its prompt; None: nothing has come of it

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)


def has_many_scores(parts: Iterable[ChoiceResult | Delta]) -> bool:
    """Whether to write them takes longer than an event loop may stand still."""
    return sum(len(part.logprobs) + len(part.prompt_logprobs) for part in parts) > LONG_POSITIONS


Kept = Literal["all", "text", "counts"]


class Transcript:
    """Adds deltas up."""

    def __init__(self, num_choices: int, *, n: int, num_prompt_tokens: int, keep: Kept = "all") -> None:
        """`num_choices` = prompts times `n`. "text": tokens and their text, but no log-probabilities; "counts": what usage and
        provenance need."""
        self.fingerprint: str | None = None  # of the latest delta that has one
        self.num_thought: int | None = None  # tokens, as the reader of the text has found them; None = it looks for none
        self.choices = [ChoiceResult(index=index) for index in range(num_choices)]
        self._n = n
        self._num_prompt_tokens = num_prompt_tokens
        self._keep: Kept = keep
        self._completion_tokens = 0
        self._cached_tokens = 0  # of all prompts; `usage` is asked for with every chunk, and choices may be a thousand

    def add(self, delta: Delta) -> None:
        """Append one delta to its choice."""
        choice = self.choices[delta.index]
        self._completion_tokens += len(delta.token_ids)
        self.fingerprint = delta.fingerprint or self.fingerprint
        if delta.token_ids or delta.finish is not FinishReason.ABORT:  # else it may end before it begins
            self._found(choice, max(choice.cached_tokens or 0, delta.cached_tokens))
        choice.provenance = delta.provenance or choice.provenance
        choice.finish = delta.finish or choice.finish
        choice.stop = delta.stop if delta.stop is not None else choice.stop
        if self._keep != "counts":
            choice.texts.append(delta.text)
            if len(choice.texts) > MOST_TEXTS:
                choice.texts = [choice.text]
            choice.token_ids.extend(delta.token_ids)
        if self._keep == "all":
            choice.logprobs += delta.logprobs
            choice.prompt_logprobs += delta.prompt_logprobs

    @property
    def is_finished(self) -> bool:
        """Every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Counts so far; a prompt counts once however many choices it has."""
        return Usage(self._num_prompt_tokens, self._completion_tokens, self._cached_tokens, self.num_thought)

    def _found(self, choice: ChoiceResult, cached_tokens: int) -> None:
        """The choice that came to a worker first found what was cached; its siblings may find all of the prompt."""
        if cached_tokens == choice.cached_tokens:
            return
        begin = choice.index - choice.index % self._n
        siblings = self.choices[begin : begin + self._n]
        self._cached_tokens -= _fewest_cached(siblings)
        choice.cached_tokens = cached_tokens
        self._cached_tokens += _fewest_cached(siblings)


def _fewest_cached(choices: list[ChoiceResult]) -> int:
    return min((choice.cached_tokens for choice in choices if choice.cached_tokens is not None), default=0)
