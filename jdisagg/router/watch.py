"""Notices what no request fails by: workers that are there together and cannot pair, or compute unlike bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jdisagg.core.fleet import Key, Member
from jdisagg.core.requests import Role
from jdisagg.router.partners import Partners, Usual, differing, named

SETTLE_S = 10.0  # restarts and upgrades pass through such states
LONELY_S = 300.0  # a roll-out passes through it: new workers load while all that would pair with them do, too


class _Lasting:
    """Of whom something has been the matter for long."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._keys: frozenset[Key] = frozenset()
        self._since_s = 0.0  # the last one of them came
        self._told: frozenset[Key] = frozenset()

    def is_news(self, members: Iterable[Member], now_s: float) -> bool:
        """Whether to tell of them now: some were not told of yet, and nobody has joined them for so long."""
        keys = frozenset(member.key for member in members)
        if not keys <= self._keys:
            self._since_s = now_s
        self._keys, self._told = keys, self._told & keys
        if keys == self._told or now_s - self._since_s < self._least_s:
            return False
        self._told = keys
        return True


class FleetWatch:
    """Asked now and then; says once of each worker what has lasted."""

    def __init__(self) -> None:
        self._apart, self._unlike = _Lasting(SETTLE_S), _Lasting(SETTLE_S)
        self._lonely: dict[Key, _Lasting] = {}  # each by itself: in so long a time somebody may always join them

    def look(self, members: Sequence[Member], now_s: float) -> list[str]:
        """What to tell the operator."""
        partners, usual, said = Partners(members), Usual(members), list[str]()
        ps, ds = _apart(partners)
        if self._apart.is_news((*ps, *ds), now_s):
            said.append(_told_apart(ps, ds))
        apart = {member.key for member in (*ps, *ds)}  # where there are some of both roles, these are all
        lonely = [member for member in members if partners.lacks(member) and member.key not in apart]
        self._lonely = {member.key: self._lonely.get(member.key) or _Lasting(LONELY_S) for member in lonely}
        if lonely := [member for member in lonely if self._lonely[member.key].is_news([member], now_s)]:
            why = f"{partners.why(lonely)}; it has been so for {LONELY_S / 60:g} minutes"
            said.append(f"{lonely[0].role.value} {named(lonely)} {why}")
        unlike = [member for member in members if usual.lacks(member)]
        if self._unlike.is_news(unlike, now_s):
            said.append(usual.why_all(unlike))
        return said


def _apart(partners: Partners) -> tuple[list[Member], list[Member]]:
    """Workers of both kinds that find nobody to pair with."""
    ps, ds = partners.without(Role.PREFILL), partners.without(Role.DECODE)
    if not ps:  # the other decode workers have them all: who computes prompts itself does without
        ps, ds = list(partners.of(Role.PREFILL)), [d for d in ds if d.needs_prefill]
    return (ps, ds) if ps and ds else ([], [])


def _told_apart(ps: Sequence[Member], ds: Sequence[Member]) -> str:
    unserved = any(d.needs_prefill for d in ds)
    then = "--local-prefill never: they serve nothing" if unserved else "decode workers compute their prompts themselves"
    return f"prefill {named(ps)} and decode {named(ds)} do not pair: {differing(ps, ds)} must be the same on both; {then}"
