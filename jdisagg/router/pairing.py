"""Notices prefill and decode workers that are there together and cannot pair: such a fleet serves slowly, and nothing fails."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.fleet import Key, Member
from jdisagg.core.requests import Role
from jdisagg.router.partners import LonelyWatch, Partners, differing, named

SETTLE_S = 10.0  # restarts and upgrades pass through such states


class PairingWatch:
    """Asked now and then; answers once for each set of workers that stays so, and for each one that is alone on its side."""

    def __init__(self) -> None:
        self._apart: frozenset[Key] = frozenset()
        self._since_s = 0.0
        self._said: frozenset[Key] = frozenset()
        self._lonely = LonelyWatch()

    def look(self, members: Sequence[Member], now_s: float) -> str | None:
        """What to tell the operator, or None."""
        partners = Partners(members)
        return self._look_apart(partners, now_s) or self._lonely.look(partners, self._apart, now_s)

    def _look_apart(self, partners: Partners, now_s: float) -> str | None:
        """Workers of both kinds that find nobody to pair with."""
        ps, ds = partners.without(Role.PREFILL), partners.without(Role.DECODE)
        if not ps:  # the other decode workers have them all: who computes prompts itself does without
            ps, ds = list(partners.of(Role.PREFILL)), [d for d in ds if d.needs_prefill]
        apart = frozenset(member.key for member in (*ps, *ds)) if ps and ds else frozenset()
        if apart != self._apart:
            self._apart, self._since_s = apart, now_s
        if not apart:
            self._said = apart
            return None
        if apart == self._said or now_s - self._since_s < SETTLE_S:
            return None
        self._said = apart
        unserved = any(d.needs_prefill for d in ds)
        then = "--local-prefill never: they serve nothing" if unserved else "decode workers compute their prompts themselves"
        return f"prefill {named(ps)} and decode {named(ds)} do not pair: {differing(ps, ds)} must be the same on both; {then}"
