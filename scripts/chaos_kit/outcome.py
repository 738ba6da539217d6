"""What became of one request, and what its tokens say when they are laid beside the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

from chaos_kit.catalogue import Entry

Tokens = dict[int, list[int]]  # by choice


class Fate(Enum):
    """How a client's request goes on once it is sent."""

    STAYS = "stays"
    CANCELS = "client_cancel"  # the call is cancelled
    ABORTS = "client_abort"  # another call ends it
    LEAVES = "client_disconnect"  # its connection is closed


class Flaw(Enum):
    """What is wrong with a stream of tokens."""

    WRONG = "wrong"
    LOST = "lost"
    DUPLICATED = "duplicated"


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
    tokens: Tokens = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    complete: Tokens | None = None  # the closing message's tokens, over gRPC
    error: str | None = None
    detail: str = ""
    went_away: bool = False
    hung: bool = False
    changed: bool = False  # what was sent again differs from what had come before
    times_sent: int = 0
    seconds: float = 0.0
    largest_gap_s: float = 0.0  # between two arrivals of tokens
    last_s: float | None = None  # of those arrivals

    def send(self) -> None:
        """The visit is sent, once more perhaps: what came before does not count."""
        self.tokens, self.finish, self.error, self.complete = {}, {}, None, None
        self.largest_gap_s, self.last_s = 0.0, None
        self.times_sent += 1

    def take(self, choice: int, token_ids: Sequence[int]) -> None:
        """Tokens arrive, now."""
        now_s = monotonic()
        self.tokens.setdefault(choice, []).extend(token_ids)
        self.largest_gap_s = max(self.largest_gap_s, now_s - (self.last_s or now_s))
        self.last_s = now_s

    @property
    def well(self) -> bool:
        """Ended as it should."""
        return self.error is None and not self.went_away and not self.hung


def flaw_of(got: list[int], wanted: list[int], *, whole: bool) -> Flaw | None:
    """How `got` differs from `wanted`, or from a beginning of it unless it should be the `whole`."""
    same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    rest = got[same:]
    if not rest:
        return Flaw.LOST if whole and len(got) < len(wanted) else None
    window = rest[:8]
    if any(wanted[at : at + len(window)] == window for at in range(same + 1, len(wanted))) and len(window) > 1:
        return Flaw.LOST
    if any(wanted[at : at + len(window)] == window for at in range(same)):
        return Flaw.DUPLICATED
    return Flaw.DUPLICATED if len(got) > len(wanted) and same == len(wanted) else Flaw.WRONG


def flaws_in(outcome: Outcome, entry: Entry, wanted: Tokens, *, exact: bool) -> list[Flaw]:
    """All that is wrong with an outcome. In `fast` numerics a continuation may differ; counts and sent tokens may not."""
    flaws = [Flaw.WRONG] if exact and outcome.changed else []
    for choice in range(entry.n):
        got = outcome.tokens.get(choice, [])
        if exact:
            flaw = flaw_of(got, wanted[choice], whole=outcome.well)
        else:
            flaw = _miscounted(outcome, choice, entry)
        if flaw is None and outcome.complete is not None and outcome.complete.get(choice, []) != got:
            flaw = Flaw.WRONG
        flaws += [flaw] if flaw is not None else []
    return flaws


def _miscounted(outcome: Outcome, choice: int, entry: Entry) -> Flaw | None:
    count = len(outcome.tokens.get(choice, []))
    if count > entry.max_tokens:
        return Flaw.DUPLICATED
    if outcome.well and outcome.finish.get(choice) == "length" and count < entry.max_tokens:
        return Flaw.LOST
    return None
