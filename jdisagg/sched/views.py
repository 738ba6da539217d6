"""What the scheduler shows of its sequences: to the role that fetches their KV, and to people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.sched.plan import PageTable
from jdisagg.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Reserved:
    """A remote sequence just got pages: the KV of tokens [held_tokens, num_tokens) has to come into `page_table`."""

    request_id: str
    page_table: PageTable
    held_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence lost its pages so that another one could go on (itself, when none was free for its own next token)."""

    request_id: str
    wanted_by: str  # request id
    num_pages: int  # it held


def describe(sequence: Sequence) -> dict[str, Any]:
    """One sequence as JSON-able data."""
    return {
        "request_id": sequence.request_id,
        "attempt": sequence.request.attempt,
        "status": sequence.status.value,
        "prompt_tokens": len(sequence.request.prompt_token_ids),
        "generated_tokens": len(sequence.generated),
        "computed_tokens": sequence.num_computed,
        "scheduled_tokens": sequence.num_scheduled,
        "in_flight_tokens": sequence.num_in_flight,
        "pages": len(sequence.holding.pages),
        "held_tokens": sequence.holding.held_tokens,
        "slot": sequence.slot,
        "deadline_s": sequence.request.deadline_s,
    }
