"""What clients got, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench_kit.figures import quantile

from chaos_kit.catalogue import Entry
from chaos_kit.outcome import Choices, Fate, Outcome, flaws_in

NUM_GAPS = 10
NUM_EXAMPLES = 20
LEAST_SUCCESS = 0.995  # of what clients did not give up
LEAST_ABORTED = 0.5  # of Aborts: others meet a stream that ends just then, or whose router dies


@dataclass(kw_only=True)
class Tally:
    """Outcomes of one run. `exact`: what ended well and differs from the reference is a flaw."""

    exact: bool
    requests: int = 0
    well: int = 0
    diverged: int = 0  # `fast` only: well ended, other tokens than the reference
    away: int = 0
    sent_again: int = 0  # to another router, theirs having died
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    flaws: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    told_to_end: int = 0  # Aborts whose stream still ran
    aborted: int = 0  # of these streams, those that ended by it
    latencies_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, str]] = field(default_factory=list)  # (s between two tokens, request), the longest ones

    def take(self, outcomes: Sequence[Outcome], catalogue: Sequence[Entry], answers: Sequence[Choices]) -> None:
        """Judge what clients got."""
        for outcome in outcomes:
            entry, wanted = catalogue[outcome.visit.entry], answers[outcome.visit.entry]
            flaws = flaws_in(outcome, entry, wanted, exact=self.exact)
            self.flaws.update(flaw.value for flaw in flaws)
            self.requests += 1
            self.hung += outcome.is_stuck
            self.sent_again += outcome.times_sent - 1
            if outcome.went_away:
                self.away += 1
                self.told_to_end += outcome.visit.fate is Fate.ABORTS
                self.aborted += outcome.was_aborted
            elif outcome.error is None:
                self.well += 1
                self.diverged += any(outcome.tokens_of(index) != right.tokens for index, right in wanted.items())
                self.latencies_s.append(outcome.seconds)
                self.gaps.append((outcome.largest_gap_s, _name(outcome)))
            else:
                self.failures[outcome.error] += 1
                self._example(outcome, f"{outcome.error}: {outcome.detail}")
            if flaws:
                got = {index: outcome.choices.get(index) for index in wanted}
                self._example(outcome, f"{[flaw.value for flaw in flaws]}: got {got}, wanted {wanted}")
        self.gaps = sorted(self.gaps, reverse=True)[:NUM_GAPS]

    def _example(self, outcome: Outcome, text: str) -> None:
        if len(self.examples) < NUM_EXAMPLES:
            visit = outcome.visit
            where = f"{_name(outcome)} (entry {visit.entry}, {visit.fate.value}, sent {outcome.times_sent} times)"
            self.examples.append(f"{where}: {text}"[:1200])

    @property
    def success(self) -> float:
        """Share of the requests their clients did not give up that ended well."""
        kept = self.requests - self.away
        return self.well / kept if kept else 1.0

    @property
    def enough(self) -> bool:
        """Whether that is enough; where the share allows less than one failure, one is allowed."""
        kept = self.requests - self.away
        return kept - self.well <= max(1.0, (1.0 - LEAST_SUCCESS) * kept)

    def latency_s(self, share: float) -> float:
        """Of what ended well; `share` 0.99 = p99."""
        return quantile(self.latencies_s, share) if self.latencies_s else 0.0

    def complaints(self) -> list[str]:
        """Everything about the clients' streams that makes this run a failure."""
        found = [f"{count} {flaw} streams" for flaw, count in self.flaws.items()]
        if self.told_to_end - self.aborted > max(1.0, (1.0 - LEAST_ABORTED) * self.told_to_end):
            found.append(f"{self.aborted} of {self.told_to_end} streams that were aborted ended by that")
        return found + ([f"{self.hung} hung"] if self.hung else [])


def _name(outcome: Outcome) -> str:
    visit = outcome.visit
    return f"request {visit.number} over HTTP" if visit.over_http else f"chaos-{visit.number}-{outcome.times_sent}"
