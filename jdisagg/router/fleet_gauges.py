"""What a router's `/metrics` shows of its workers, counted when it is asked for."""

from __future__ import annotations

from functools import partial
from time import monotonic

from jdisagg.core.fleet import State
from jdisagg.core.metrics import FleetMetrics
from jdisagg.core.requests import Role
from jdisagg.router.fleet import Fleet


def show_fleet(fleet: Fleet, metrics: FleetMetrics) -> None:
    """Call once: every role and state has its number from now on, be it 0."""

    def states() -> dict[tuple[str, ...], int]:
        counts = fleet.count_states(monotonic())
        return {(role.value, state.value): counts[role, state] for role in Role for state in State}

    def unlike() -> dict[tuple[str, ...], int]:
        counts = fleet.count_unlike()
        return {(role.value,): counts[role] for role in Role}

    for role in Role:
        metrics.workers.labels(role=role.value).set_function(partial(fleet.count, role))
        metrics.draining.labels(role=role.value).set_function(partial(fleet.count_draining, role))
    metrics.states.set_function(states)
    metrics.unlike.set_function(unlike)
