"""A scheduler's whole state for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jdisagg.sched.table import SequenceTable
from jdisagg.sched.views import describe


def snapshot(table: SequenceTable) -> dict[str, Any]:
    """Live sequences by status, pages, host memory and counters as JSON-able data."""
    return {
        "counts": {status.value: len(queue) for status, queue in table.queues.items()},
        "pages": {"total": table.pages.num_usable, "free": table.pages.num_free},
        "host_tokens": {"total": table.host.capacity_tokens, "used": table.host.used_tokens},
        "prefix_cache": table.pages.describe_index(),
        "stats": asdict(table.stats),
        "sequences": [describe(s) for queue in table.queues.values() for s in queue],
    }
