"""Faults a process makes on purpose, to show that the fleet survives them. Never in service: it takes two variables.

    JDISAGG_TEST_HOOKS=1 JDISAGG_TEST_FAULTS=corrupt:0.02,late:0.01,seed:7 python -m jdisagg.serve ..

The number is the share of the calls that suffer the fault. `jdisagg.transfer.drill` and `jdisagg.router.drill` make the faults.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jdisagg.core.errors import ConfigError

HOOKS_VARIABLE = "JDISAGG_TEST_HOOKS"
FAULTS_VARIABLE = "JDISAGG_TEST_FAULTS"
KINDS = frozenset(
    """
    corrupt scramble truncate disconnect missing slow error_array late duplicate late_message duplicate_message
    late_output attempts_ignored leases_ignored
    """.split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """Which faults, how often. Empty = none."""

    rates: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def has(self, kind: str) -> bool:
        """Whether the fault is asked for."""
        return self.rates.get(kind, 0.0) > 0

    def plan(self, *kinds: str) -> Iterator[str | None] | None:
        """For every call the fault it suffers, or None; None when none of `kinds` is asked for.

        Dealt like cards, not thrown like dice: of each 1 / rate calls exactly one suffers the fault.
        """
        rates = {kind: self.rates[kind] for kind in kinds if self.has(kind)}
        return _Dealer(rates, self.seed) if rates else None


class _Dealer:
    """Endless decks. Not a generator, and locked: the threads that fetch from several peers share one."""

    def __init__(self, rates: Mapping[str, float], seed: int) -> None:
        num_calls = max(len(rates), round(1 / min(rates.values())))
        cards: list[str | None] = [kind for kind, rate in rates.items() for _ in range(max(1, round(rate * num_calls)))]
        self._cards = cards + [None] * (num_calls - len(cards))
        self._rng = random.Random(f"{seed} {sorted(rates)}")
        self._left: list[str | None] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str | None]:
        return self

    def __next__(self) -> str | None:
        with self._lock:
            if not self._left:
                self._left = self._rng.sample(self._cards, len(self._cards))
            return self._left.pop()


def drill_of(environ: Mapping[str, str] = os.environ) -> Drill:
    """What the environment asks for. Raises ConfigError that names the part it cannot read."""
    if environ.get(HOOKS_VARIABLE) != "1":
        return Drill()
    rates: dict[str, float] = {}
    seed = 0
    for part in filter(None, environ.get(FAULTS_VARIABLE, "").split(",")):
        name, _, value = part.partition(":")
        if name == "seed" and value.isdecimal():
            seed = int(value)
        elif name in KINDS and _is_share(value):
            rates[name] = float(value)
        else:
            known = ", ".join(sorted(KINDS))
            raise ConfigError(f"{FAULTS_VARIABLE}: got {part!r}, wanted KIND:SHARE with a share in [0, 1], or seed:N; {known}")
    return Drill(rates=rates, seed=seed)


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False
