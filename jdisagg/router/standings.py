"""What a router makes of a worker beside the others that are there, for operators: `fleet list` and jdisagg_worker_states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from jdisagg.core.fleet import Member, Standing, State
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry
from jdisagg.router.partners import Partners, Usual
from jdisagg.router.usable import missing_without

_AT_WORK = frozenset({State.SERVING, State.SUSPECT, State.UNPAIRED})
NO_PARTNER = "no prefill worker pairs with it (--local-prefill never)"


def standing_among(entry: Entry, partners: Partners, now_s: float) -> Standing:
    """For operators: who does not serve for several reasons has the one that would stay. Why nobody pairs with it,
    `partners.why` says."""
    return Standing(*_state(entry, partners, now_s), entry.pending)


def standings_of(entries: Iterable[Entry], now_s: float) -> list[tuple[Member, Standing]]:
    """Each, and what is made of it in words; of those of the same weights these are looked for once."""
    entries = list(entries)
    partners, usual = Partners(entry.member for entry in entries), Usual(entry.member for entry in entries)
    said: dict[tuple[Role, str, State], str] = {}
    found: list[tuple[Member, Standing]] = []
    for entry in entries:
        member, standing = entry.member, standing_among(entry, partners, now_s)
        key = (member.role, member.card.fingerprint, standing.state)
        if standing.state is State.UNPAIRED:
            said[key] = said.get(key) or partners.why([member])
            standing = replace(standing, why=said[key])
        elif standing.why == NO_PARTNER and partners.lacks(member):
            said[key] = said.get(key) or f"{NO_PARTNER}: {partners.differs([member])}"
            standing = replace(standing, why=said[key])
        elif not standing.why and usual.lacks(member):
            standing = replace(standing, why=usual.why(member))
        found.append((member, standing))
    return _with_missing(entries, found)


def _with_missing(entries: list[Entry], found: list[tuple[Member, Standing]]) -> list[tuple[Member, Standing]]:
    """With what would be missing without those that are the last of their work: of each role and weights one is asked for."""
    works = [standing.state in _AT_WORK for _, standing in found]
    kinds = [(member.role, member.card.fingerprint) for member, _ in found]
    at_work = Counter(kind for kind, does in zip(kinds, works, strict=True) if does)
    return [
        (member, replace(standing, missing_without=missing_without(entry, entries)))
        if does and at_work[kind] == 1
        else (member, standing)
        for entry, (member, standing), does, kind in zip(entries, found, works, kinds, strict=True)
    ]


def _state(entry: Entry, partners: Partners, now_s: float) -> tuple[State, str]:
    member, why_unreached = entry.member, entry.reach.why_not
    if member.draining:
        return State.DRAINING, ""
    if member.decodes and not entry.linked:
        return State.UNREACHED if why_unreached else State.CONNECTING, why_unreached
    if entry.is_quiet:
        return State.SILENT, ""
    if member.not_ready:
        return State.NOT_READY, member.not_ready
    if partners.leave_idle(member):
        return State.NOT_READY, NO_PARTNER
    if partners.lacks(member):
        return State.UNPAIRED, ""
    return State.SUSPECT if entry.suspect_until_s > now_s else State.SERVING, ""
