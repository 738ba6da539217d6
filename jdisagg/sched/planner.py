"""Decides one step: running sequences first, then whoever can start, all within one token budget and one read budget.

There are no phases: a sequence is planned until its computed tokens have caught up with its known ones. Decodes go before
prompts, except with the policy prefill-first.
"""

from __future__ import annotations

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.intake import Limits
from jdisagg.sched.rows import RowPlanner
from jdisagg.sched.starter import Starter
from jdisagg.sched.states import Status
from jdisagg.sched.steps import Draft
from jdisagg.sched.table import SequenceTable

HOST_IS_NEEDED = (Status.WAITING, Status.PREALLOC, Status.TRANSFER, Status.READY, Status.FORKING)


class Planner:
    """Moves sequences of its table and drafts the step that follows from it."""

    def __init__(
        self, table: SequenceTable, rows: RowPlanner, starter: Starter, config: SchedulerConfig, limits: Limits
    ) -> None:
        self._table = table
        self._rows = rows
        self._starter = starter
        self._config = config
        self._limits = limits

    def draft(self) -> Draft:
        """Plan one step. Order is (rank, arrival) throughout, so equal histories give equal drafts."""
        self._table.preempted.clear()
        reads = self._config.max_num_kv_read_tokens or float("inf")
        draft = Draft(self._config.max_num_batched_tokens, reads, num_steps=self._num_steps(reads))
        # before the step is drafted: pages are copied before its chunks are computed
        donors = self._table.groups.donors(self._table.queues[Status.FORKING])
        if self._limits.role is Role.PREFILL:
            self._rows.plan_chunks(draft)
        elif self._config.scheduling_policy == "prefill-first":
            self._rows.plan_chunks(draft)
            self._rows.plan_decodes(draft)
        else:
            self._rows.plan_decodes(draft)
            self._rows.plan_chunks(draft)
        self._starter.start(draft, donors)
        self._table.reads_left = draft.reads
        return draft

    def _num_steps(self, reads: float) -> int:
        """Decode steps of this dispatch: one unless nothing but decoding goes on and pages for all of them are free."""
        wanted = self._config.num_scheduler_steps
        if wanted == 1 or self._limits.role is Role.PREFILL or any(self._table.queues[status] for status in HOST_IS_NEEDED):
            return 1
        running = list(self._table.queues[Status.RUNNING])
        if not all(s.is_decoding and not s.request.by_grammar for s in running):
            return 1
        num_steps = min(wanted, max((s.num_wanted for s in running), default=1))
        if num_steps <= 1:
            return 1
        pages = sum(max(0, self._rows.pages_to_decode(s, num_steps) - len(s.holding.pages)) for s in running)
        tokens = sum(s.num_known + s.num_in_flight + num_steps for s in running)
        return num_steps if pages <= self._table.pages.num_free and tokens <= reads else 1
