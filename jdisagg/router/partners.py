"""Which workers of a fleet go together: of the same weights prefill and decode pair, of the same bits streams may move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jdisagg.core.bits import SAME_BY, are_unlike
from jdisagg.core.fingerprint import Difference, difference
from jdisagg.core.fleet import Member
from jdisagg.core.requests import Role
from jdisagg.core.told import few_of

_SHOWN = 12  # characters of a fingerprint
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_LONELY_THEN = {  # what becomes of those that have nobody on the other side, while others have
    Role.PREFILL: "gets none of this router's prompts, as no decode worker here has the same weights",
    Role.DECODE: "is asked after others that are well, as no prefill worker here has the same weights",
}
_UNLIKE_THEN = (
    "a stream that moves between them goes on, but is not the same to the last bit as --numerics exact would have it; "
    f"{SAME_BY} give the same"
)


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
        return f"{_LONELY_THEN[lonely[0].role]}: {self.differs(lonely)}"

    def differs(self, lonely: Sequence[Member]) -> str:
        """The second half of it alone."""
        both = self._of | {lonely[0].role: list(lonely)}
        return f"{differing(both[Role.PREFILL], both[Role.DECODE])} must be the same on both"


class Usual:
    """The bits that most workers of each fingerprint compute with `--numerics exact`, of those that tried the same and do not
    drain; of as many, those of the first.

    Those with others serve and pair, no request is lost by it. But a stream that moves from one to another, or whose prompt one
    computes for the other, is not what a single worker would have given, to the last bit: so who has the bits of a stream is
    asked first (`Fleet.choose`).
    """

    def __init__(self, members: Iterable[Member]) -> None:
        counts: dict[tuple[str, str], Counter[str]] = {}
        for member in members:
            if member.bits and not member.draining:
                counts.setdefault(_compared(member), Counter())[member.bits] += 1
        self._bits = {compared: of_them.most_common(1)[0] for compared, of_them in counts.items()}

    def lacks(self, member: Member) -> bool:
        """Whether it computes others, and does not drain."""
        usual, _ = self._bits.get(_compared(member), ("", 0))
        return not member.draining and are_unlike(usual, member.bits)

    def differs(self, member: Member) -> str:
        """Of one that does, in words."""
        usual, count = self._bits[_compared(member)]
        others = f"{count} worker{'s' if count > 1 else ''} of its weights"
        return f"bits {member.bits}, where {others} compute{'' if count > 1 else 's'} {usual}"

    def why(self, member: Member) -> str:
        """The same, and what follows."""
        return f"{self.differs(member)}: {_UNLIKE_THEN}"

    def why_all(self, members: Iterable[Member]) -> str:
        """The same of several, who they are."""
        alike: dict[str, list[str]] = {}
        for member in members:
            alike.setdefault(self.differs(member), []).append(f"{member.role.value} worker {member.worker}")
        told = [f"{few_of(names, ', ')}: {differs}" for differs, names in alike.items()]
        return f"{few_of(told, '; ')}: {_UNLIKE_THEN}"


def differing(ps: Sequence[Member], ds: Sequence[Member]) -> str:
    """What tells every P from every D, each difference once; all it can be when none of them says."""
    of_ps, of_ds = (dict.fromkeys(member.fingerprint_parts for member in members) for members in (ps, ds))  # most are alike
    found = (difference(of_p, of_d) for of_p in of_ps for of_d in of_ds)
    told = dict.fromkeys(_told(one) for one in found if one is not None)
    return "; ".join(told) or "weights, model configuration and --numerics"


def named(members: Sequence[Member]) -> str:
    """They, and the weights that they have."""
    names = [f"{member.worker} (fingerprint {member.card.fingerprint[:_SHOWN]})" for member in members]
    return f"worker{'s' if len(members) > 1 else ''} {few_of(names, ', ')}"


def _told(found: Difference) -> str:
    also = f"; also {', '.join(found.also)}" if found.also else ""
    return f"{found.name} (prefill {found.wanted}, decode {found.got}{also})"


def _compared(member: Member) -> tuple[str, str]:
    """Those for which it is the same compute the same, or should."""
    return member.card.fingerprint, member.bits.partition("-")[0]
