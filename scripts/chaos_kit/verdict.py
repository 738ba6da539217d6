"""What a run has shown: one table for people, one dict for machines, and whether it is good enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos_kit.catalogue import Entry
from chaos_kit.outcome import Flaw, Outcome, Tokens, flaws_in
from chaos_kit.striker import Strike

NUM_GAPS = 10
LEAST_SUCCESS = 0.995  # of what clients did not give up


@dataclass(kw_only=True)
class Verdict:
    """One seed's run."""

    seed: int
    exact: bool
    requests: int = 0
    seconds: float = 0.0
    well: int = 0
    diverged: int = 0  # `fast` only: well ended, other tokens than the reference
    away: int = 0
    sent_again: int = 0  # to another router, theirs having died
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    flaws: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    latencies_s: list[float] = field(default_factory=list)
    gaps: list[tuple[float, str]] = field(default_factory=list)  # (s between two tokens, request), the longest ones
    strikes: list[Strike] = field(default_factory=list)
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> (fired, hit a live transfer)
    recoveries: dict[str, float] = field(default_factory=dict)
    transfer_failures: dict[str, float] = field(default_factory=dict)
    forwarded_bytes: int = 0  # from P to D, as the forwarders saw them: what was sent again or spoilt included
    verified_bytes: float = 0.0  # of KV, as the D counted them
    leaks: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)  # of processes nobody struck
    problems: list[str] = field(default_factory=list)

    def take(self, outcomes: Sequence[Outcome], catalogue: Sequence[Entry], answers: Sequence[Tokens]) -> None:
        """Judge what clients got."""
        for outcome in outcomes:
            entry, wanted = catalogue[outcome.visit.entry], answers[outcome.visit.entry]
            flaws = flaws_in(outcome, entry, wanted, exact=self.exact)
            self.flaws.update(flaw.value for flaw in flaws)
            self.requests += 1
            self.hung += outcome.hung
            self.sent_again += outcome.times_sent - 1
            if outcome.went_away:
                self.away += 1
            elif outcome.error is None:
                self.well += 1
                self.diverged += outcome.tokens != wanted
                self.latencies_s.append(outcome.seconds)
                self.gaps.append((outcome.largest_gap_s, _name(outcome)))
            else:
                self.failures[outcome.error] += 1
                self._example(outcome, f"{outcome.error}: {outcome.detail}")
            if flaws:
                got = {choice: outcome.tokens.get(choice) for choice in wanted}
                self._example(outcome, f"{[flaw.value for flaw in flaws]}: got {got}, wanted {wanted}")

        self.gaps = sorted(self.gaps, reverse=True)[:NUM_GAPS]

    def _example(self, outcome: Outcome, text: str) -> None:
        if len(self.examples) < 20:
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

    def complaints(self) -> list[str]:
        """Everything that makes this run a failure."""
        found = [f"{count} {flaw} streams" for flaw, count in self.flaws.items()]
        found += [f"{self.hung} hung"] if self.hung else []
        found += [f"leak: {leak}" for leak in self.leaks]
        found += [f"died by itself: {death}" for death in self.deaths]
        found += self.problems
        if not self.enough:
            found.append(f"{self.success:.2%} ended well, wanted {LEAST_SUCCESS:.1%}: {dict(self.failures)}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        ordered = sorted(self.latencies_s)
        strikes = [asdict(strike) for strike in self.strikes]
        summary = {name: value for name, value in vars(self).items() if name not in ("latencies_s", "strikes")}
        return summary | {
            "success": self.success,
            "latency_s": {f"p{share}": _quantile(ordered, share / 100) for share in (50, 99, 100)},
            "strikes": strikes,
            "complaints": self.complaints(),
        }

    def text(self) -> str:
        """The table."""
        ordered = sorted(self.latencies_s)
        divergence = "" if self.exact else f", {self.diverged} of them diverged from the reference"
        lines = [
            f"seed {self.seed}: {self.requests} requests in {self.seconds:.0f} s: {self.well} well{divergence}, "
            f"{self.away} given up by clients, {sum(self.failures.values())} failed {dict(self.failures)}; "
            f"{self.sent_again} sent again to another router",
            f"  tokens: {', '.join(f'{self.flaws[flaw.value]} {flaw.value}' for flaw in Flaw)}; {self.hung} hung; "
            f"success {self.success:.2%}",
            f"  latency p50 {_quantile(ordered, 0.5):.2f} s, p99 {_quantile(ordered, 0.99):.2f} s, "
            f"max {_quantile(ordered, 1.0):.2f} s; longest gaps in streams (s): "
            + ", ".join(f"{gap_s:.2f} {name}" for gap_s, name in self.gaps[:3]),
            f"  {'fault':<20}{'fired':>7}{'live':>7}   {'whole again after, max s':<24} victims",
        ]
        for kind, (fired, live) in self.faults.items():
            mine = [strike for strike in self.strikes if strike.kind == kind]
            after = f"{max(strike.whole_after_s for strike in mine):.1f}" if mine else ""
            victims = ", ".join(f"{name} {n}" for name, n in sorted(Counter(strike.victim for strike in mine).items()))
            lines.append(f"  {kind:<20}{fired:>7}{live:>7}   {after:<24} {victims}")
        lines.append("  recoveries: " + (_counts(self.recoveries) or "none"))
        lines.append("  failed transfers: " + (_counts(self.transfer_failures) or "none"))
        moved = f"{self.forwarded_bytes / 1e6:.1f} MB left P, {self.verified_bytes / 1e6:.1f} MB of KV verified at D"
        lines.append(f"  bytes: {moved}")
        lines += [f"  e.g. {example}" for example in self.examples[:8]]
        complaints = self.complaints()
        lines.append("  RED:" if complaints else "  GREEN: nothing wrong, lost, duplicated, hung, leaked or dead")
        return "\n".join(lines + [f"    {complaint}" for complaint in complaints])


def _name(outcome: Outcome) -> str:
    visit = outcome.visit
    return f"request {visit.number} over HTTP" if visit.over_http else f"chaos-{visit.number}-{outcome.times_sent}"


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _counts(counters: dict[str, float]) -> str:
    return ", ".join(f"{name.partition('{')[2].rstrip('}')} {value:g}" for name, value in sorted(counters.items()))
