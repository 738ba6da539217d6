"""Inter-token latency of a stream on D: alone, while P computes for others, and while their KV is imported.

A prompt that ends with its first token is computed on P and not transferred, so the second and the third kind differ by the
import alone; the first and the second by what two processes on one machine do to each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg_bench.client import Client, counters
from disagg_bench.figures import gaps, median, met, milliseconds, table
from disagg_bench.model import Prompts
from disagg_bench.workers import Workers

KINDS = {"alone": 0, "P busy": 1, "importing": 2}  # kind -> tokens that the prompts beside the stream ask for
TARGET = 1.10  # P99 while importing against P99 without
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
    prompts: list[list[int]]
    max_tokens: int
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    error: Exception | None = None

    def run(self) -> None:
        """The thread's body; what fails is kept for the one who waits."""
        try:
            for prompt in self.prompts:
                if self.stop.is_set():
                    return
                self.client.run(prompt, self.max_tokens)
                self.done += 1
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
    probe = workers.decode.client.run(prompts.next(num_tokens), 2)
    spells = []
    for _ in range(rounds):
        prompt = prompts.next(STEADY_PROMPT_TOKENS)
        steady = Steady(prompt=prompt, max_tokens=max_tokens, seconds=imports * probe.second_s)
        for kind in KINDS:
            beside = [prompts.next(num_tokens) for _ in range(2 * imports + 2)]
            spells.append(_spell(workers, kind, steady, beside))
    return spells


def _spell(workers: Workers, kind: str, steady: Steady, prompts: list[list[int]]) -> Spell:
    """The prompts beside it start with its first token, or P would compute them before it."""
    client = workers.decode.client
    beside = Beside(client, prompts if KINDS[kind] else [], KINDS[kind])
    before = counters(workers.decode.http)
    thread = threading.Thread(target=beside.run, name="beside", daemon=True)
    stream = client.run(steady.prompt, steady.max_tokens, seconds=steady.seconds, on_first_token=thread.start)
    grown = counters(workers.decode.http)[_BYTES] - before[_BYTES]
    beside.stop.set()
    thread.join()
    if beside.error is not None:
        raise RuntimeError(f"the prompts beside the stream ({kind})") from beside.error
    gaps_s = gaps(stream.token_s)
    if len(gaps_s) <= _SKIPPED:
        waits = ", ".join(f"{1e3 * gap_s:.0f}" for gap_s in gaps_s)
        raise RuntimeError(f"{stream.request_id} ({kind}) stood still: {waits} ms between its tokens")
    return Spell(kind=kind, gaps_s=gaps_s[_SKIPPED:], beside=beside.done, num_bytes=grown)


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

    def ratio(of: str, to: str) -> float:
        return median([a / b for a, b in zip(p99[of], p99[to], strict=True)])

    to_alone, to_busy = ratio("importing", "alone"), ratio("importing", "P busy")
    return {
        "num_tokens": num_tokens,
        "kinds": kinds,
        "p99_importing_over_alone": to_alone,
        "p99_importing_over_busy": to_busy,
        "target": TARGET,
        "verdict": met(to_alone <= TARGET),
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
    ratios = f"{of['p99_importing_over_alone']:.2f} of alone, {of['p99_importing_over_busy']:.2f} of P busy"
    return [
        *table(
            f"3. Inter-token latency of a stream on D, with prompts of {of['num_tokens']} tokens beside it; ms",
            ("", *(f"p{p:g}" for p in QUANTILES), "p99/p50", "gaps", "prompts", "MiB imported"),
            rows,
        ),
        f"   P99 while importing: {ratios} (medians of rounds); target at most {TARGET:.2f} of alone: {of['verdict']}",
    ]
