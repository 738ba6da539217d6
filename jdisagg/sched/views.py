"""What the scheduler tells its role of sequences: who got pages, and who lost them."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.sched.plan import PageTable


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
