"""Requests come, get their place, and run out of time."""

from __future__ import annotations

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, Unavailable
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.sched.admission import Admission
from jdisagg.sched.committer import Committer
from jdisagg.sched.forecast import Forecast
from jdisagg.sched.forks import may_wait
from jdisagg.sched.intake import Limits, check_request
from jdisagg.sched.queue_limit import QueueLimit
from jdisagg.sched.sequence import Sequence, WaitState
from jdisagg.sched.states import Status
from jdisagg.sched.stops import find_stop, stop_ids
from jdisagg.sched.table import SequenceTable

ALL_NEW = 2**62  # more than will ever come: numbers of those that go on are below zero


class Arrivals:
    """Turns requests into sequences of its table, and ends those whose deadline has passed."""

    def __init__(
        self, table: SequenceTable, admission: Admission, committer: Committer, config: SchedulerConfig, limits: Limits
    ) -> None:
        self._table = table
        self._admission = admission
        self._committer = committer
        self._config = config
        self._limits = limits
        self._queue_limit = QueueLimit(table, config.max_queue_len)
        self._forecast = Forecast(table)
        self._num_added = 0
        self._next_deadline_s = float("inf")
        self._complete: list[Output] = []  # of requests that were over when they came (a replay whose last output got lost)
        self.is_draining = False

    def add(self, request: EngineRequest, now_s: float, *, remote: bool, goes_on: bool, kept: int) -> None:
        """As Scheduler.add."""
        if self.is_draining:
            raise Unavailable("this worker is draining; send the request to another one")
        if request.request_id in self._table.live:
            raise InvalidRequest(f"request id {request.request_id!r} is live already; use a new one", field="request_id")
        check_request(request, self._limits, knows_prompt=self._table.groups.has_prompt(request))
        stops = stop_ids(request.sampling, self._limits.eos_token_ids)
        if self._end_if_complete(request, stops):
            return
        status = Status.PREALLOC if remote else Status.WAITING
        begun = goes_on or bool(request.generated_token_ids)
        order = self._order(request, now_s, begun=begun)
        decodes = self._limits.role is not Role.PREFILL  # a choice that forks feeds the prompt's last token in a decode step
        if decodes and self._table.groups.can_wait(request, remote=remote):
            status = Status.FORKING
        else:
            if decodes:  # P's clients are decode workers, which counted the wait for it
                self._forecast.check(request, order, now_s)
            # a choice that waits for its sibling takes no place of its own
            group = request.fork_group if decodes and may_wait(request, remote=remote) else ""
            self._queue_limit.admit(now_s, goes_on=begun, num_asked=request.num_asked, group=group, kept=kept)
            self._forecast.added(now_s)
        sequence = Sequence(
            request=request,
            order=order,
            status=status,
            target=request.num_tokens,
            stop_ids=stops,
            wait=WaitState(is_remote=remote, is_open=not remote),
        )
        self._num_added += 1
        self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        if status is Status.PREALLOC:
            self._admission.pin_prefix(sequence)
        self._table.add(sequence)

    def planned(self, now_s: float) -> None:
        """A plan was made: some may have left the queue."""
        self._queue_limit.observe(now_s)
        self._forecast.observe(now_s)

    def is_due(self, now_s: float) -> bool:
        """`expire` has something to say or to end."""
        return bool(self._complete) or now_s >= self._next_deadline_s

    @property
    def has_complete(self) -> bool:
        """The end of some request is still to be told."""
        return bool(self._complete)

    def forget(self, request_id: str) -> None:
        """Nobody wants to hear its end any more."""
        self._complete = [output for output in self._complete if output.request_id != request_id]

    def expire(self, now_s: float) -> list[Output]:
        """As Scheduler.expire."""
        outputs, self._complete = self._complete, []
        if now_s < self._next_deadline_s:
            return outputs
        for sequence in [s for s in self._table.live.values() if s.request.deadline_s <= now_s]:
            error = DeadlineExceeded(
                f"request {sequence.request_id} passed its deadline while {sequence.status.value}, "
                f"after {len(sequence.generated)} of {sequence.request.sampling.max_tokens} tokens; allow more time"
            )
            if (output := self._committer.failure(sequence, error)) is not None:
                outputs.append(output)
        self._next_deadline_s = min((s.request.deadline_s for s in self._table.live.values()), default=float("inf"))
        return outputs

    def _order(self, request: EngineRequest, now_s: float, *, begun: bool) -> tuple[float, int]:
        """(rank, number). A request whose client has some of its answer already goes before all new ones of its priority that
        wait, at the rank of the first of them: no others are passed than that one would pass. So many as were let in before."""
        rank = self._rank(request, now_s)
        if not begun:
            return rank, self._num_added
        if self._config.scheduling_policy == "priority":
            for queue in (self._table.queues[Status.WAITING], self._table.queues[Status.PREALLOC]):
                ranks = (s.order[0] for s in queue.head(len(queue)) if s.request.priority == request.priority)
                rank = min(rank, next(ranks, rank))
        return rank, self._num_added - ALL_NEW

    def _rank(self, request: EngineRequest, now_s: float) -> float:
        """Lower goes first. A request of a worse priority is passed only by those that come at most (difference in priority) x
        `priority_aging_s` after it: all waiting age alike, so their order never changes."""
        if self._config.scheduling_policy != "priority":
            return 0.0
        aging_s = self._config.priority_aging_s
        return now_s + request.priority * aging_s if aging_s > 0 else float(request.priority)

    def _end_if_complete(self, request: EngineRequest, stops: frozenset[int]) -> bool:
        """A resumed request may have got all its tokens already: then only its end is owed."""
        generated = request.generated_token_ids
        stop = find_stop(generated[-1], len(generated), request.sampling, stops) if generated else None
        if stop is not None:
            finish, stop_token_id = stop
            self._complete.append(
                Output(request_id=request.request_id, attempt=request.attempt, finish=finish, stop_token_id=stop_token_id)
            )
        return stop is not None
