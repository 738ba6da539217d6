"""Short and long prompts at a fixed rate: what streams feel on a unified worker and on 1P+1D of the same cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from bench_kit.client import Client, TimedStream
from bench_kit.figures import gaps, milliseconds, table
from bench_kit.model import Prompts

from disagg_bench.workers import Workers

SHORT_PROMPT_TOKENS, SHORT_OUTPUT_TOKENS = 64, 64
LONG_OUTPUT_TOKENS = 2
LONG_LOAD = 0.4  # share of P's time that the long prompts take
DISAGGREGATED = "1P+1D"
PAIRS = ("first_to_second_ms", "short_ttft_ms", "long_ttft_ms")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Open loop: who comes does not wait for who came."""

    long_tokens: int
    long_every_s: float
    short_every_s: float
    seconds: float  # during which requests arrive


@dataclass(kw_only=True)
class Served:
    """One run of one subject."""

    subject: str
    short: list[TimedStream] = field(default_factory=list)
    long: list[TimedStream] = field(default_factory=list)

    @property
    def itl_s(self) -> list[float]:
        """Gaps within the short streams, first to second token included."""
        return [gap for stream in self.short for gap in gaps(stream.token_s)]


def measure(workers: Workers, prompts: Prompts, rate: Rate, *, rounds: int) -> list[Served]:
    """`rounds` times every subject in turns, the same prompts at the same times."""
    subjects = {"unified, P's core": workers.unified.client, DISAGGREGATED: workers.decode.client}
    if workers.unified_wide is not None:
        subjects = {"unified, both": workers.unified_wide.client, **subjects}
    served = []
    for number in range(rounds):
        arrivals = _arrivals(prompts, rate)
        order = list(subjects) if number % 2 == 0 else list(reversed(subjects))
        served += [_serve(subject, subjects[subject], arrivals) for subject in order]
    return served


def _arrivals(prompts: Prompts, rate: Rate) -> list[tuple[float, list[int], int]]:
    """(second, prompt, tokens wanted), in order of time; the long ones come between the short ones."""
    shorts = [number * rate.short_every_s for number in range(int(rate.seconds / rate.short_every_s))]
    longs = [(number + 0.3) * rate.long_every_s for number in range(int(rate.seconds / rate.long_every_s))]
    arrivals = [(at_s, prompts.next(SHORT_PROMPT_TOKENS), SHORT_OUTPUT_TOKENS) for at_s in shorts]
    arrivals += [(at_s, prompts.next(rate.long_tokens), LONG_OUTPUT_TOKENS) for at_s in longs]
    return sorted(arrivals, key=lambda arrival: arrival[0])


def _serve(subject: str, client: Client, arrivals: Sequence[tuple[float, list[int], int]]) -> Served:
    served = Served(subject=subject)
    started: list[tuple[bool, Future[TimedStream]]] = []
    with ThreadPoolExecutor(max_workers=len(arrivals)) as pool:
        began_s = time.monotonic()
        for at_s, prompt, max_tokens in arrivals:
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            started.append((max_tokens == SHORT_OUTPUT_TOKENS, pool.submit(client.run, prompt, max_tokens)))
        for is_short, future in started:
            (served.short if is_short else served.long).append(future.result())
    return served


def summary(served: Sequence[Served], rate: Rate) -> dict[str, Any]:
    """Figures per subject over all rounds, and the ratio of P99 to 1P+1D round by round."""
    subjects: dict[str, Any] = {}
    p99 = {one.subject: [milliseconds(s.itl_s, 0.99) for s in served if s.subject == one.subject] for one in served}
    for subject, tails in p99.items():
        mine = [one for one in served if one.subject == subject]
        itl = [gap for one in mine for gap in one.itl_s]
        subjects[subject] = {
            **{f"itl_p{p}_ms": milliseconds(itl, p / 100) for p in (50, 90, 99)},
            "itl_max_ms": 1e3 * max(itl),
            "first_to_second_ms": {f"p{p}": milliseconds([s.gap_s for o in mine for s in o.short], p / 100) for p in (50, 99)},
            "short_ttft_ms": {f"p{p}": milliseconds([s.first_s for o in mine for s in o.short], p / 100) for p in (50, 99)},
            "long_ttft_ms": {f"p{p}": milliseconds([s.first_s for o in mine for s in o.long], p / 100) for p in (50, 99)},
            "p99_over_disaggregated": statistics.median([a / b for a, b in zip(tails, p99[DISAGGREGATED], strict=True)]),
            "streams": sum(len(one.short) for one in mine),
        }
    return {"rate": asdict(rate), "subjects": subjects}


def lines(of: dict[str, Any]) -> list[str]:
    """The table."""
    rate = of["rate"]
    shorts = f"a prompt of {SHORT_PROMPT_TOKENS} tokens every {rate['short_every_s']:.2f} s ({SHORT_OUTPUT_TOKENS} out)"
    rows = [
        [
            subject,
            *(f"{row[f'itl_{name}_ms']:.1f}" for name in ("p50", "p90", "p99", "max")),
            f"{row['p99_over_disaggregated']:.2f}",
            *(f"{row[kind]['p50']:.0f}, {row[kind]['p99']:.0f}" for kind in PAIRS),
            str(row["streams"]),
        ]
        for subject, row in of["subjects"].items()
    ]
    return table(
        f"5. Mixed load: {shorts}, one of {rate['long_tokens']} every {rate['long_every_s']:.1f} s; ITL of the short ones; ms",
        "; p50; p90; p99; max; p99 ratio; 1st to 2nd p50, p99; short TTFT p50, p99; long TTFT p50, p99; streams".split("; "),
        rows,
    )
