"""A scheduler's whole state for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jdisagg.sched.sequence import Sequence
from jdisagg.sched.table import SequenceTable


def snapshot(table: SequenceTable) -> dict[str, Any]:
    """Live sequences by status, pages, host memory and counters as JSON-able data."""
    return {
        "counts": {status.value: len(queue) for status, queue in table.queues.items()},
        "pages": {"total": table.pages.num_usable, "free": table.pages.num_free},
        "host_tokens": {"total": table.host.capacity_tokens, "used": table.host.used_tokens},
        "prefix_cache": table.pages.describe_index(),
        "stats": asdict(table.stats),
        "sequences": [_describe(s) for queue in table.queues.values() for s in queue],
    }


def _describe(sequence: Sequence) -> dict[str, Any]:
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
