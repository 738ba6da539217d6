"""Inter-token latency of a stream on D: alone, beside what comes with an import, and while KV of others is imported.

    alone       nothing else
    P busy      prompts that end with their first token: computed on P, never transferred
    decoding    a prompt of which D holds all but the last page, again and again: one step of D decodes two rows for each
    both        the second and the third kind at once: all that goes on while KV is imported, but no import
    importing   prompts nobody holds: computed on P, imported by D, and then one such step for each

What imports and P's work beside them add is the last kind against the third; what imports alone add, against the fourth: P and
D have a core each, and one memory. The step of two rows, of which one reads a long context, is the slowest of all, one in some
300: enough to move the P99, and no part of an import.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from bench_kit.client import Client
from bench_kit.figures import gaps, met, milliseconds, quantile, table
from bench_kit.model import Prompts

from disagg_bench.workers import Workers

KINDS = ("alone", "P busy", "decoding", "both", "importing")
TARGET = 1.10  # P99 while importing against P99 while D does the same without imports
STEADY_PROMPT_TOKENS = 128
QUANTILES = (50, 90, 99, 99.9)
_BYTES = "jdisagg_transfer_bytes_total"
_SKIPPED = 8  # gaps at the start of a stream


@dataclass(kw_only=True)
class Spell:
    """One stream of one kind."""

    kind: str
    gaps_s: list[float]
    beside: int  # prompts that ended beside it
    num_bytes: float  # imported meanwhile


@dataclass
class Beside:
    """Prompts one after the other, from a thread of their own, until told to stop."""

    client: Client
    prompts: Iterable[list[int]]
    max_tokens: int
    every_s: float = 0.0  # at least, from start to start
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    error: Exception | None = None

    def run(self) -> None:
        """The thread's body; what fails is kept for the one who waits."""
        try:
            for prompt in self.prompts:
                if self.stop.is_set():
                    return
                stream = self.client.run(prompt, self.max_tokens)
                self.done += 1
                self.stop.wait(stream.sent_s + self.every_s - time.monotonic())
        except Exception as error:  # noqa: BLE001 - `spell` raises it
            self.error = error


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The stream that is watched."""

    prompt: list[int]
    max_tokens: int
    seconds: float  # from its first token


def measure(workers: Workers, prompts: Prompts, num_tokens: int, *, rounds: int, imports: int, max_tokens: int) -> list[Spell]:
    """`rounds` times each kind in turns; a stream lasts about as long as `imports` prompts of `num_tokens`."""
    client = workers.decode.client
    second_s = client.run(prompts.next(num_tokens), 2).second_s
    spells = []
    for _ in range(rounds):
        prompt = prompts.next(STEADY_PROMPT_TOKENS)
        steady = Steady(prompt=prompt, max_tokens=max_tokens, seconds=imports * second_s)
        for kind in KINDS:
            besides: list[Beside] = []
            if kind in ("P busy", "both"):
                besides.append(Beside(client=client, prompts=_new(prompts, num_tokens, imports), max_tokens=1))
            if kind in ("decoding", "both"):
                held = prompts.next(num_tokens)
                client.run(held, 2)  # from now on D holds it
                besides.append(Beside(client=client, prompts=repeat(held), max_tokens=2, every_s=second_s))
            if kind == "importing":
                besides.append(Beside(client=client, prompts=_new(prompts, num_tokens, imports), max_tokens=2))
            spells.append(_spell(workers, kind, steady, besides))
    return spells


def _new(prompts: Prompts, num_tokens: int, imports: int) -> list[list[int]]:
    """More than can end beside one stream."""
    return [prompts.next(num_tokens) for _ in range(2 * imports + 2)]


def _spell(workers: Workers, kind: str, steady: Steady, besides: Sequence[Beside]) -> Spell:
    """The prompts beside it start with its first token, or P would compute them before it."""
    client = workers.decode.client
    before = workers.decode.counters()
    threads = [threading.Thread(target=beside.run, name="beside", daemon=True) for beside in besides]

    def start() -> None:
        for thread in threads:
            thread.start()

    stream = client.run(steady.prompt, steady.max_tokens, seconds=steady.seconds, on_first_token=start)
    grown = workers.decode.counters()[_BYTES] - before[_BYTES]
    for beside, thread in zip(besides, threads, strict=True):
        beside.stop.set()
        thread.join()
        if beside.error is not None:
            raise RuntimeError(f"the prompts beside the stream ({kind})") from beside.error
    gaps_s = gaps(stream.token_s)
    if len(gaps_s) <= _SKIPPED:
        waits = ", ".join(f"{1e3 * gap_s:.0f}" for gap_s in gaps_s)
        raise RuntimeError(f"{stream.request_id} ({kind}) stood still: {waits} ms between its tokens")
    num_beside = sum(beside.done for beside in besides)
    return Spell(kind=kind, gaps_s=gaps_s[_SKIPPED:], beside=num_beside, num_bytes=grown)


def summary(spells: Sequence[Spell], num_tokens: int) -> dict[str, Any]:
    """Figures per kind over all gaps, and ratios of P99 round by round."""
    kinds: dict[str, Any] = {}
    p99 = {kind: [milliseconds(spell.gaps_s, 0.99) for spell in spells if spell.kind == kind] for kind in KINDS}
    for kind in KINDS:
        mine = [spell for spell in spells if spell.kind == kind]
        every = [gap for spell in mine for gap in spell.gaps_s]
        quantiles = {f"p{p:g}_ms": milliseconds(every, p / 100) for p in QUANTILES}
        kinds[kind] = {
            **quantiles,
            "p99_over_p50": quantiles["p99_ms"] / quantiles["p50_ms"],
            "gaps": len(every),
            "prompts_beside": sum(spell.beside for spell in mine),
            "imported_bytes": sum(spell.num_bytes for spell in mine),
        }

    def ratio(to: str) -> dict[str, float]:
        ratios = [a / b for a, b in zip(p99["importing"], p99[to], strict=True)]
        return {name: quantile(ratios, share) for name, share in (("p25", 0.25), ("p50", 0.5), ("p75", 0.75))}

    ratios = {kind: ratio(kind) for kind in KINDS if kind != "importing"}
    return {
        "num_tokens": num_tokens,
        "kinds": kinds,
        "p99_importing_over": ratios,
        "target": TARGET,
        "verdict": met(ratios["decoding"]["p50"] <= TARGET and kinds["importing"]["imported_bytes"] > 0),
    }


def lines(of: dict[str, Any]) -> list[str]:
    """The table."""
    rows = [
        [
            kind,
            *(f"{row[f'p{p:g}_ms']:.2f}" for p in QUANTILES),
            f"{row['p99_over_p50']:.2f}",
            str(row["gaps"]),
            str(row["prompts_beside"]),
            f"{row['imported_bytes'] / 2**20:.1f}",
        ]
        for kind, row in of["kinds"].items()
    ]
    ratios = ", ".join(
        f"{ratio['p50']:.2f} [{ratio['p25']:.2f} to {ratio['p75']:.2f}] of {kind}"
        for kind, ratio in of["p99_importing_over"].items()
    )
    return [
        *table(
            f"3. Inter-token latency of a stream on D, with prompts of {of['num_tokens']} tokens beside it; ms",
            ("", *(f"p{p:g}" for p in QUANTILES), "p99/p50", "gaps", "prompts", "MiB imported"),
            rows,
        ),
        f"   P99 while importing: {ratios} (rounds: median [p25 to p75])",
        f"   target: at most {TARGET:.2f} of decoding: {of['verdict']}",
    ]
