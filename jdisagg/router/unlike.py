"""Workers of the same weights that compute unlike bits with `--numerics exact`: for operators, nobody loses a request by it.

They serve and pair. But a stream that moves from one to another, or whose prompt one computes for the other, is not what a
single worker would have given, to the last bit: so who has the bits of a stream is asked first (`Fleet.choose`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jdisagg.core.bits import SAME_BY, are_unlike
from jdisagg.core.fleet import Member
from jdisagg.core.told import first_of
from jdisagg.router.partners import process

SETTLE_S = 10.0  # restarts and upgrades pass through such states


class Usual:
    """The bits that most workers of each fingerprint compute; of as many, those of the first."""

    def __init__(self, members: Iterable[Member]) -> None:
        counts: dict[str, Counter[str]] = {}
        for member in members:
            if member.bits:
                counts.setdefault(member.card.fingerprint, Counter())[member.bits] += 1
        self._bits = {fingerprint: of_it.most_common(1)[0] for fingerprint, of_it in counts.items()}

    def bits(self, fingerprint: str) -> str:
        """Empty where nobody has told any."""
        return self._bits.get(fingerprint, ("", 0))[0]

    def lacks(self, member: Member) -> bool:
        """Whether it computes others."""
        return are_unlike(self.bits(member.card.fingerprint), member.bits)

    def why(self, member: Member) -> str:
        """Of one that does, in words."""
        usual, count = self._bits[member.card.fingerprint]
        others = f"{count} worker{'s' if count > 1 else ''} of its weights"
        return (
            f"bits {member.bits}, where {others} compute{'' if count > 1 else 's'} {usual}: a stream that moves between them "
            f"goes on, but is not the same to the last bit as --numerics exact would have it; {SAME_BY} give the same"
        )


class BitsWatch:
    """Asked now and then; names once each set of workers that stays so."""

    def __init__(self) -> None:
        self._unlike: frozenset[tuple[str, str]] = frozenset()  # (address, epoch)
        self._since_s = 0.0
        self._is_said = True

    def look(self, members: Sequence[Member], now_s: float) -> str | None:
        """What to tell the operator, or None."""
        usual = Usual(members)
        found = [member for member in members if usual.lacks(member)]
        unlike = frozenset(map(process, found))
        if unlike != self._unlike:
            self._is_said = self._is_said and unlike < self._unlike  # nothing new where one of them has left
            self._unlike, self._since_s = unlike, now_s
        if self._is_said or not unlike or now_s - self._since_s < SETTLE_S:
            return None
        self._is_said = True
        names = [f"{member.role.value} worker {member.worker}" for member in found]
        return f"{first_of(names, ', ')}: {usual.why(found[0])}"
