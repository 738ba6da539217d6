"""The life of one sequence in one worker, as a transition table.

P, unified:  WAITING -> RUNNING -> (P: PUBLISHING until the hand-off is released) -> FINISHED
                ^_________________________ PARKED (P: pages given to others before D had any)
D:           PREALLOC -> TRANSFER -> READY -> RUNNING -> FINISHED
             no memory   KV on its   waits for
             yet         way         a slot
preempted:   RUNNING | READY -> WAITING (recompute here, or restore from host memory) | PREALLOC (D that must not prefill)
n > 1:       FORKING (until a sibling's prompt KV is there) -> READY | WAITING or PREALLOC (it has to lead)
fall-back:   PREALLOC | TRANSFER -> WAITING
P borrows:   WAITING -> PREALLOC (before anything of it ran)
cancelled, failed, expired: any -> FINISHED
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """Where a sequence is. Values are the gauge labels."""

    WAITING = "waiting"
    PREALLOC = "prealloc"
    TRANSFER = "transfer"
    READY = "ready"
    FORKING = "forking"
    RUNNING = "running"
    PUBLISHING = "publishing"
    PARKED = "parked"
    FINISHED = "finished"


LIVE = tuple(status for status in Status if status is not Status.FINISHED)

ALLOWED: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.PREALLOC, Status.FINISHED}),
    Status.PREALLOC: frozenset({Status.TRANSFER, Status.WAITING, Status.FINISHED}),
    Status.TRANSFER: frozenset({Status.READY, Status.WAITING, Status.FINISHED}),
    Status.READY: frozenset({Status.RUNNING, Status.WAITING, Status.PREALLOC, Status.FINISHED}),
    Status.FORKING: frozenset({Status.READY, Status.WAITING, Status.PREALLOC, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.PREALLOC, Status.PUBLISHING, Status.FINISHED}),
    Status.PUBLISHING: frozenset({Status.PARKED, Status.FINISHED}),
    Status.PARKED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A sequence was asked to go where the table does not lead: our bug."""


def check_transition(request_id: str, old: Status, new: Status) -> None:
    """Raise IllegalTransition unless old -> new is in the table."""
    if new not in ALLOWED[old]:
        raise IllegalTransition(
            f"request {request_id}: {old.value} -> {new.value}; allowed: {sorted(s.value for s in ALLOWED[old])}"
        )
