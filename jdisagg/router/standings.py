"""What a router makes of a worker beside the others that are there, for operators: `fleet list` and jdisagg_worker_states."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.fleet import Standing, State
from jdisagg.router.entry import Entry
from jdisagg.router.partners import Partners

NO_PARTNER = "no prefill worker pairs with it (--local-prefill never)"


def standing_among(entry: Entry, partners: Partners, now_s: float) -> Standing:
    """Of one that nothing else is the matter with, whether it has somebody to pair with."""
    found = entry.standing(now_s)
    if found.state not in (State.SERVING, State.SUSPECT):
        return found
    if entry.member.needs_prefill and not partners.has(entry.member):
        return replace(found, state=State.NOT_READY, why=NO_PARTNER)
    if partners.lacks(entry.member):
        return replace(found, state=State.UNPAIRED, why=partners.why([entry.member]))
    return found
