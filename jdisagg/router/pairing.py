"""Notices prefill and decode workers that are there together and cannot pair: such a fleet serves slowly, and nothing fails."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.fingerprint import Difference, difference
from jdisagg.core.fleet import Member
from jdisagg.core.requests import Role

SETTLE_S = 10.0  # restarts and upgrades pass through such states
_SHOWN = 12  # characters of a fingerprint


class PairingWatch:
    """Asked now and then; answers once for each set of workers that stays so."""

    def __init__(self) -> None:
        self._lonely: frozenset[tuple[str, str]] = frozenset()  # (address, epoch)
        self._since_s = 0.0
        self._said: frozenset[tuple[str, str]] = frozenset()

    def look(self, members: Sequence[Member], now_s: float) -> str | None:
        """What to tell the operator, or None."""
        there = [member for member in members if not member.draining]
        all_ps, all_ds = ([m for m in there if m.role is role] for role in (Role.PREFILL, Role.DECODE))
        ps, ds = _without_partner(all_ps, all_ds), _without_partner(all_ds, all_ps)
        if not ps:  # the other decode workers have them all: who computes prompts itself does without
            ps, ds = all_ps, [d for d in ds if d.needs_prefill]
        lonely = frozenset((m.address, m.epoch) for m in (*ps, *ds)) if ps and ds else frozenset()
        if lonely != self._lonely:
            self._lonely, self._since_s = lonely, now_s
        if not lonely:
            self._said = lonely
            return None
        if lonely == self._said or now_s - self._since_s < SETTLE_S:
            return None
        self._said = lonely
        unserved = any(d.needs_prefill for d in ds)
        then = "--local-prefill never: they serve nothing" if unserved else "decode workers compute their prompts themselves"
        apart = f"prefill {_names(ps)} and decode {_names(ds)} do not pair"
        return f"{apart}: {differing(ps, ds)} must be the same on both; {then}"


def _without_partner(mine: Sequence[Member], theirs: Sequence[Member]) -> list[Member]:
    partners = {member.card.fingerprint for member in theirs}
    return [member for member in mine if member.card.fingerprint not in partners]


def differing(ps: Sequence[Member], ds: Sequence[Member]) -> str:
    """What tells every P from every D, each difference once; all it can be when none of them says."""
    of_ps, of_ds = (dict.fromkeys(member.fingerprint_parts for member in members) for members in (ps, ds))  # most are alike
    found = (difference(of_p, of_d) for of_p in of_ps for of_d in of_ds)
    told = dict.fromkeys(_told(one) for one in found if one is not None)
    return "; ".join(told) or "weights, model configuration and --numerics"


def _told(found: Difference) -> str:
    also = f"; also {', '.join(found.also)}" if found.also else ""
    return f"{found.name} (prefill {found.wanted}, decode {found.got}{also})"


def _names(members: Sequence[Member]) -> str:
    named = ", ".join(f"{member.worker} (fingerprint {member.card.fingerprint[:_SHOWN]})" for member in members)
    return f"worker{'s' if len(members) > 1 else ''} {named}"
