"""What a router makes of a worker beside the others that are there, for operators: `fleet list` and jdisagg_worker_states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jdisagg.core.fleet import Member, Standing, State
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry
from jdisagg.router.partners import Partners
from jdisagg.router.unlike import Usual

NO_PARTNER = "no prefill worker pairs with it (--local-prefill never)"


def standing_among(entry: Entry, partners: Partners, now_s: float) -> Standing:
    """Of one that nothing else is the matter with, whether it has somebody to pair with. Why not, `partners.why` says."""
    found = entry.standing(now_s)
    if found.state not in (State.SERVING, State.SUSPECT):
        return found
    if partners.leave_idle(entry.member):
        return replace(found, state=State.NOT_READY, why=NO_PARTNER)
    return replace(found, state=State.UNPAIRED) if partners.lacks(entry.member) else found


def standings_of(entries: Iterable[Entry], now_s: float) -> list[tuple[Member, Standing]]:
    """Each, and what is made of it in words; of those of the same weights these are looked for once."""
    entries = list(entries)
    partners, usual = Partners(entry.member for entry in entries), Usual(entry.member for entry in entries)
    said: dict[tuple[Role, str], str] = {}
    found: list[tuple[Member, Standing]] = []
    for entry in entries:
        member, standing = entry.member, standing_among(entry, partners, now_s)
        if standing.state is State.UNPAIRED:
            key = (member.role, member.card.fingerprint)
            said[key] = said.get(key) or partners.why([member])
            standing = replace(standing, why=said[key])
        elif not standing.why and usual.lacks(member):
            standing = replace(standing, why=usual.why(member))
        found.append((member, standing))
    return found
