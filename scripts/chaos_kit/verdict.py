"""What a run has shown: one table for people, one dict for machines, and whether it is good enough."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos_kit.choice import Flaw
from chaos_kit.striker import Strike
from chaos_kit.tally import LEAST_SUCCESS, Tally

LONG_RUN_REQUESTS = 1000  # in which every kind of fault has its chance
LEAST_MOVED = 20  # of so many answers one at least has KV that came from P: where all is computed by D, nothing was drilled


@dataclass(frozen=True, kw_only=True)
class Counted:
    """By the processes themselves, and by the forwarders between them."""

    recoveries: dict[str, float] = field(default_factory=dict)
    transfer_failures: dict[str, float] = field(default_factory=dict)
    compiles: dict[str, float] = field(default_factory=dict)  # by processes that had said READY
    retractions: int = 0
    host_tokens: dict[str, float] = field(default_factory=dict)  # of what was retracted: KV to host memory and back
    forwarded_bytes: int = 0  # from P to D, as the forwarders saw them: what was sent again or spoilt included
    verified_bytes: float = 0.0  # of KV, as the D counted them

    def lines(self) -> list[str]:
        """For people."""
        moved = f"{self.forwarded_bytes / 1e6:.1f} MB left P, {self.verified_bytes / 1e6:.1f} MB of KV verified at D"
        copied = _counts(self.host_tokens) or "none"
        return [
            "  recoveries: " + (_counts(self.recoveries) or "none"),
            "  failed transfers: " + (_counts(self.transfer_failures) or "none"),
            f"  retracted: {self.retractions}; tokens to host memory and back: {copied}",
            f"  bytes: {moved}",
        ]


@dataclass(kw_only=True)
class Verdict:
    """One seed's run."""

    seed: int
    tally: Tally
    seconds: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> (fired, hit a live transfer)
    asked: frozenset[str] = frozenset()  # kinds of them
    counted: Counted = field(default_factory=Counted)
    transfers: bool = False  # in this fleet P computes what D decodes
    lives: dict[str, tuple[int, int]] = field(default_factory=dict)  # role -> (processes, those whose memory was judged)
    leaks: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)  # of processes nobody struck
    tracebacks: list[str] = field(default_factory=list)  # in logs: whatever is done to a worker, it knows what that is
    problems: list[str] = field(default_factory=list)

    def complaints(self) -> list[str]:
        """Everything that makes this run a failure."""
        tally, found = self.tally, self.tally.complaints()
        found += [f"leak: {leak}" for leak in self.leaks]
        found += [f"died by itself: {death}" for death in self.deaths]
        found += [f"traceback in a log: {line}" for line in self.tracebacks]
        found += [f"compiled after READY: {count:g} {name}" for name, count in self.counted.compiles.items()]
        found += self.problems
        if tally.requests >= LONG_RUN_REQUESTS:
            found += [f"never fired: {kind}" for kind in sorted(self.asked) if not self.faults.get(kind, (0, 0))[0]]
        if self.transfers and tally.well >= LEAST_MOVED and not self.counted.verified_bytes:
            found.append(f"no KV came from P, and {tally.well} requests ended well")
        if not tally.enough:
            found.append(f"{tally.success:.2%} ended well, wanted {LEAST_SUCCESS:.1%}: {dict(tally.failures)}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        strikes = [asdict(strike) for strike in self.strikes]
        everything = vars(self) | vars(self.tally) | vars(self.counted)
        left_out = ("latencies_s", "strikes", "tally", "counted")
        summary = {name: value for name, value in everything.items() if name not in left_out}
        return summary | {
            "success": self.tally.success,
            "latency_s": {f"p{share}": self.tally.latency_s(share / 100) for share in (50, 99, 100)},
            "strikes": strikes,
            "asked": sorted(self.asked),
            "complaints": self.complaints(),
        }

    def text(self) -> str:
        """The table."""
        tally = self.tally
        divergence = "" if tally.exact else f", {tally.diverged} of them diverged from the reference"
        lines = [
            f"seed {self.seed}: {tally.requests} requests in {self.seconds:.0f} s: {tally.well} well{divergence}, "
            f"{tally.away} given up by clients, {sum(tally.failures.values())} failed {dict(tally.failures)}; "
            f"{tally.sent_again} sent again to another router",
            f"  tokens: {', '.join(f'{tally.flaws[flaw.value]} {flaw.value}' for flaw in Flaw)}; {tally.hung} hung; "
            f"success {tally.success:.2%}",
            f"  latency p50 {tally.latency_s(0.5):.2f} s, p99 {tally.latency_s(0.99):.2f} s, "
            f"max {tally.latency_s(1.0):.2f} s; longest gaps in streams (s): "
            + ", ".join(f"{gap_s:.2f} {name}" for gap_s, name in tally.gaps[:3]),
            f"  {'fault':<20}{'fired':>7}{'live':>7}   {'whole again after, max s':<24} victims",
        ]
        for kind, (fired, live) in self.faults.items():
            mine = [strike for strike in self.strikes if strike.kind == kind]
            after = f"{max(strike.whole_after_s for strike in mine):.1f}" if mine else ""
            victims = ", ".join(f"{name} {n}" for name, n in sorted(Counter(strike.victim for strike in mine).items()))
            lines.append(f"  {kind:<20}{fired:>7}{live:>7}   {after:<24} {victims}")
        lines += self.counted.lines()
        lines.append(f"  aborts that ended their stream: {tally.aborted} of {tally.told_to_end}")
        judged = ", ".join(f"{role} {num_judged} of {count}" for role, (count, num_judged) in sorted(self.lives.items()))
        lines.append(f"  lives long enough to see memory grow: {judged or 'none'}")
        lines += [f"  e.g. {example}" for example in tally.examples[:8]]
        complaints = self.complaints()
        lines.append("  RED:" if complaints else "  GREEN: nothing wrong, lost, duplicated, hung, leaked or dead, no traceback")
        return "\n".join(lines + [f"    {complaint}" for complaint in complaints])


def _counts(counters: dict[str, float]) -> str:
    return ", ".join(f"{name.partition('{')[2].rstrip('}')} {value:g}" for name, value in sorted(counters.items()))
