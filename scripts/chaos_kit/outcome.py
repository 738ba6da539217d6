"""What became of one request, and what that says when it is laid beside what should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from time import monotonic

from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice, Flaw

Choices = Mapping[int, Choice]


class Fate(Enum):
    """How a client's request goes on once it is sent."""

    STAYS = "stays"
    CANCELS = "client_cancel"  # the call is cancelled
    ABORTS = "client_abort"  # another call ends it
    LEAVES = "client_disconnect"  # its connection is closed


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One request of one client."""

    number: int
    entry: int  # of the catalogue
    fate: Fate
    after_s: float  # until it goes away
    over_http: bool
    stream: bool
    priority: int
    cache_salt: str


@dataclass(kw_only=True)
class Outcome:
    """`error` = its name, None when it ended well; `detail` what came with it."""

    visit: Visit
    choices: dict[int, Choice] = field(default_factory=dict)
    complete: Choices | None = None  # as the closing message has them, over gRPC; it has no log probabilities
    usage: tuple[int, int] | None = None  # tokens of the prompt, and of all choices, as told
    error: str | None = None
    detail: str = ""
    went_away: bool = False
    hung: bool = False
    changed: bool = False  # what was sent again differs from what had come before
    times_sent: int = 0
    seconds: float = 0.0
    silent_s: float = 0.0  # of these, since the last token
    largest_gap_s: float = 0.0  # between two arrivals of tokens
    last_s: float | None = None  # of those arrivals

    def send(self) -> None:
        """The visit is sent, once more perhaps: what came before does not count."""
        self.choices, self.error, self.complete, self.usage = {}, None, None, None
        self.largest_gap_s, self.last_s = 0.0, None
        self.times_sent += 1

    def take(self, index: int, new: Choice) -> None:
        """More of a choice arrives, now."""
        self.choices.setdefault(index, Choice()).add(new)
        if not new.tokens:
            return
        now_s = monotonic()
        self.largest_gap_s = max(self.largest_gap_s, now_s - (self.last_s or now_s))
        self.last_s = now_s

    def tokens_of(self, index: int) -> list[int]:
        """Of a choice, so far."""
        return self.choices.get(index, Choice()).tokens

    @property
    def well(self) -> bool:
        """Ended as it should."""
        return self.error is None and not self.went_away and not self.hung

    @property
    def is_stuck(self) -> bool:
        """Nothing more came, and its deadline had to end it."""
        return self.hung or (self.error == "DEADLINE_EXCEEDED" and self.silent_s > self.seconds / 2)

    @property
    def was_aborted(self) -> bool:
        """By another call, and somebody heard that."""
        return any(choice.finish == "abort" for choice in self.choices.values())


def flaws_in(outcome: Outcome, entry: Entry, wanted: Choices, *, exact: bool) -> list[Flaw]:
    """All that is wrong with an outcome. In `fast` numerics a continuation may differ; counts and what was sent may not."""
    flaws = [Flaw.WRONG] if exact and outcome.changed else []
    if outcome.well and outcome.usage != (len(entry.prompt), sum(len(choice.tokens) for choice in outcome.choices.values())):
        flaws.append(Flaw.MISTOLD)
    flaws += [Flaw.DUPLICATED for index in outcome.choices if index >= entry.n]  # nobody asked for it
    for index in range(entry.n):
        got = outcome.choices.get(index, Choice())
        got = _as_it_ran(got, entry.stop) if outcome.went_away else got
        flaw = got.flaw_beside(wanted[index], whole=outcome.well) if exact else _miscounted(outcome.well, got, entry)
        if flaw is None and outcome.complete is not None:
            flaw = replace(got, logprobs=[]).flaw_beside(outcome.complete.get(index, Choice()), whole=outcome.well)
        flaws += [flaw] if flaw is not None else []
    return flaws


def _as_it_ran(got: Choice, stop: tuple[str, ...]) -> Choice:
    """Without what its abort may have brought: text that was withheld, as it was a part of a character, or could become a stop
    string."""
    text = got.text.rstrip("\ufffd")
    begun = (each[:count] for each in stop for count in range(len(each), 0, -1))
    return replace(got, text=text.removesuffix(max(filter(text.endswith, begun), key=len, default="")), finish=None)


def _miscounted(well: bool, got: Choice, entry: Entry) -> Flaw | None:
    if len(got.tokens) > entry.max_tokens:
        return Flaw.DUPLICATED
    return Flaw.LOST if well and got.finish == "length" and len(got.tokens) < entry.max_tokens else None
