"""What all workers of a router must have in common, since it has one tokenizer, one chat template and one model's name.

Prefill workers get tokens from decode workers, with which they share a fingerprint: nothing is asked of them here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jdisagg.core.errors import Unfit
from jdisagg.core.fleet import Member

log = logging.getLogger(__name__)

LATELY_S = 3.0  # a worker that is turned away tries again several times a second
_MOST_REMEMBERED = 1000


class Entrance:
    """Turns away workers that would answer with another model than clients ask for."""

    def __init__(self, text_digest: str = "", model: str | None = None) -> None:
        """`text_digest`: see `Member`. `model`: the name in force; None = that of the workers that are here."""
        self._text_digest = text_digest
        self.model = model
        self._turned_away: dict[str, tuple[str, float]] = {}  # by worker: why, and when it last came

    def check(self, member: Member, here: Iterable[Member], now_s: float) -> None:
        """Raises Unfit for a worker that may not join those that are `here`; the log says so once."""
        why = self._objection(member, [other for other in here if other.decodes]) if member.decodes else ""
        if not why:
            self._turned_away.pop(member.worker, None)
            return
        said, _ = self._turned_away.get(member.worker, ("", 0.0))
        if len(self._turned_away) >= _MOST_REMEMBERED:
            self._turned_away.clear()
        self._turned_away[member.worker] = why, now_s
        if why != said:
            log.error("%s worker %s may not join: %s", member.role.value, member.worker, why)
        raise Unfit(why)

    def lately(self, now_s: float) -> str:
        """Who was turned away a moment ago, and why; "" = nobody."""
        found = [
            f"{worker} may not join: {why}" for worker, (why, at_s) in self._turned_away.items() if now_s - at_s < LATELY_S
        ]
        return "; ".join(found[:2])

    def _objection(self, member: Member, here: list[Member]) -> str:
        if self._text_digest and member.text_digest and member.text_digest != self._text_digest:
            return (
                f"tokenizer or chat template of its model {member.card.name!r} are not those that this router has read: "
                "start the router with the --model of its workers"
            )
        model = self.model or next((other.card.name for other in here), member.card.name)
        if member.card.name == model:
            return ""
        whose = "the router" if self.model else f"{here[0].worker}"
        return (
            f"it serves {member.card.name!r}, {whose} {model!r}: give all processes of one model the same --served-model-name, "
            "and each model a router of its own"
        )
