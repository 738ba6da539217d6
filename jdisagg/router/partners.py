"""Prefill and decode workers of the same weights, and those that have nobody on the other side while others have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jdisagg.core.fingerprint import Difference, difference
from jdisagg.core.fleet import Member
from jdisagg.core.requests import Role
from jdisagg.core.told import first_of

_SHOWN = 12  # characters of a fingerprint
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_THEN = {  # what becomes of them
    Role.PREFILL: "gets none of this router's prompts, as no decode worker here has the same weights",
    Role.DECODE: "is asked after others that are well, as no prefill worker here has the same weights",
}


class Partners:
    """Those of a fleet that may pair, as they do not drain."""

    def __init__(self, members: Iterable[Member]) -> None:
        there = [member for member in members if not member.draining]
        self._of = {role: [member for member in there if member.role is role] for role in _OTHER}
        self._weights = {role: {member.card.fingerprint for member in of} for role, of in self._of.items()}

    def of(self, role: Role) -> Sequence[Member]:
        """All of a role, of prefill and decode."""
        return self._of[role]

    def without(self, role: Role) -> list[Member]:
        """Those of a role with nobody to pair with, be it that nobody is on the other side."""
        return [member for member in self._of[role] if not self.has(member)]

    def has(self, member: Member) -> bool:
        """Whether somebody on the other side has its weights."""
        return member.card.fingerprint in self._weights[_OTHER.get(member.role, Role.PREFILL)]

    def lacks(self, member: Member) -> bool:
        """Whether it does not drain, and all that there are on the other side have other weights. For operators: no request is
        lost by it."""
        other = _OTHER.get(member.role)
        return other is not None and not member.draining and bool(self._of[other]) and not self.has(member)

    def leave_idle(self, member: Member) -> bool:
        """Whether it never computes prompts, and nobody computes them for it."""
        return member.needs_prefill and not self.has(member)

    def why(self, lonely: Sequence[Member]) -> str:
        """What follows for those of one role that lack a partner, and what keeps them from all that there are."""
        role = lonely[0].role
        both = self._of | {role: list(lonely)}
        return f"{_THEN[role]}: {differing(both[Role.PREFILL], both[Role.DECODE])} must be the same on both"


def differing(ps: Sequence[Member], ds: Sequence[Member]) -> str:
    """What tells every P from every D, each difference once; all it can be when none of them says."""
    of_ps, of_ds = (dict.fromkeys(member.fingerprint_parts for member in members) for members in (ps, ds))  # most are alike
    found = (difference(of_p, of_d) for of_p in of_ps for of_d in of_ds)
    told = dict.fromkeys(_told(one) for one in found if one is not None)
    return "; ".join(told) or "weights, model configuration and --numerics"


def named(members: Sequence[Member]) -> str:
    """They, and the weights that they have."""
    names = [f"{member.worker} (fingerprint {member.card.fingerprint[:_SHOWN]})" for member in members]
    return f"worker{'s' if len(members) > 1 else ''} {first_of(names, ', ')}"


def _told(found: Difference) -> str:
    also = f"; also {', '.join(found.also)}" if found.also else ""
    return f"{found.name} (prefill {found.wanted}, decode {found.got}{also})"
