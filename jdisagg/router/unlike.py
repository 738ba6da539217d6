"""Workers of the same weights that compute unlike bits with `--numerics exact`: for operators, nobody loses a request by it.

They serve and pair. But a stream that moves from one to another, or whose prompt one computes for the other, is not what a
single worker would have given, to the last bit: so who has the bits of a stream is asked first (`Fleet.choose`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jdisagg.core.bits import SAME_BY, are_unlike
from jdisagg.core.fleet import Member
from jdisagg.core.told import first_of

THEN = (
    "a stream that moves between them goes on, but is not the same to the last bit as --numerics exact would have it; "
    f"{SAME_BY} give the same"
)


class Usual:
    """The bits that most workers of each fingerprint compute, of those that tried the same and do not drain; of as many, those
    of the first."""

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
        return f"{self.differs(member)}: {THEN}"

    def why_all(self, members: Iterable[Member]) -> str:
        """The same of several, who they are."""
        alike: dict[str, list[str]] = {}
        for member in members:
            alike.setdefault(self.differs(member), []).append(f"{member.role.value} worker {member.worker}")
        told = [f"{first_of(names, ', ')}: {differs}" for differs, names in alike.items()]
        return f"{first_of(told, '; ')}: {THEN}"


def _compared(member: Member) -> tuple[str, str]:
    """Those for which it is the same compute the same, or should."""
    return member.card.fingerprint, member.bits.partition("-")[0]
