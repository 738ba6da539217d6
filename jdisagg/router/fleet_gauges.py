"""What a router's `/metrics` shows of its workers, counted when it is asked for."""

from __future__ import annotations

from collections import Counter
from functools import partial
from time import monotonic

from jdisagg.core.fleet import State
from jdisagg.core.metrics import FleetMetrics
from jdisagg.core.requests import Role
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet, is_idle
from jdisagg.router.partners import Partners, Usual
from jdisagg.router.standings import standing_among


def show_fleet(fleet: Fleet, metrics: FleetMetrics) -> None:
    """Call once: every role and state has its number from now on, be it 0."""

    def states() -> dict[tuple[str, ...], int]:
        counts = count_states(fleet, monotonic())
        return {(role.value, state.value): counts[role, state] for role in Role for state in State}

    def unlike() -> dict[tuple[str, ...], int]:
        counts = count_unlike(fleet)
        return {(role.value,): counts[role] for role in Role}

    for role in Role:
        metrics.workers.labels(role=role.value).set_function(partial(count_there, fleet, role))
        metrics.draining.labels(role=role.value).set_function(partial(count_draining, fleet, role))
    metrics.states.set_function(states)
    metrics.unlike.set_function(unlike)


def count_there(fleet: Fleet, role: Role) -> int:
    """Workers of a role that are there; those that decode count while they are linked, heard and ready."""
    return len(_there(fleet, role))


def count_draining(fleet: Fleet, role: Role) -> int:
    """Those of them that take no new requests, as they are about to end."""
    return sum(entry.member.draining for entry in _there(fleet, role))


def count_states(fleet: Fleet, now_s: float) -> Counter[tuple[Role, State]]:
    """How many workers of each role that have registered are in each state."""
    partners = Partners(fleet.members())
    return Counter((entry.member.role, standing_among(entry, partners, now_s).state) for entry in fleet.entries())


def count_unlike(fleet: Fleet) -> Counter[Role]:
    """How many workers of each role compute other bits than most of their weights."""
    usual = Usual(fleet.members())
    return Counter(member.role for member in fleet.members() if usual.lacks(member))


def _there(fleet: Fleet, role: Role) -> list[Entry]:
    partners = Partners(fleet.members())
    entries = [entry for entry in fleet.entries() if entry.member.role is role]
    return [entry for entry in entries if not entry.member.decodes or (entry.serves and not is_idle(entry, partners))]
