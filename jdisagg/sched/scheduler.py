"""The one scheduler of every role: what runs in the next step, whose pages are whose, what each request got.

    schedule(N+1) is called before commit(N): a decoding sequence is planned ahead of the tokens the host has seen.

Deterministic and total: equal calls give equal plans, and no call depends on anything but its arguments. The only errors
that leave are those of `add` (the caller's fault, or full) and assertions (ours).
"""

from __future__ import annotations

from typing import Any

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import RequestError
from jdisagg.core.requests import EngineRequest, Output, Role
from jdisagg.kv.events import PrefixJournal
from jdisagg.sched.admission import Admission
from jdisagg.sched.arrivals import Arrivals
from jdisagg.sched.committer import Committer
from jdisagg.sched.host_memory import HostMemory
from jdisagg.sched.intake import Limits, check_config
from jdisagg.sched.pages import PageBook
from jdisagg.sched.plan import PageTable, Plan, Sampled, StepResult
from jdisagg.sched.rows import RowPlanner
from jdisagg.sched.slots import Slots
from jdisagg.sched.snapshot import snapshot
from jdisagg.sched.starter import Starter
from jdisagg.sched.states import Status
from jdisagg.sched.steps import StepsInFlight
from jdisagg.sched.table import Preempted, Reserved, SequenceTable, Stats


class Scheduler:
    """Composition of table, planners and committer behind the calls a role makes."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        role: Role,
        max_model_len: int,
        page_size: int,
        num_pages: int,
        eos_token_ids: tuple[int, ...],
        enable_prefix_caching: bool = True,
        num_lookahead: int = 0,
        local_prefill: bool = True,
        vocab_size: int | None = None,
        host_tokens: int = 0,
    ) -> None:
        """`num_pages` counts the null page. `local_prefill` False: a decode worker whose retracted sequences are fetched
        again (`take_retracted`) instead of recomputed. `host_tokens`: KV the host may keep of those that lost their pages.
        Raises ConfigError."""
        check_config(config, role=role, max_model_len=max_model_len, num_lookahead=num_lookahead)
        pages = PageBook(num_pages=num_pages, page_size=page_size, enable_prefix_caching=enable_prefix_caching)
        self._limits = Limits(
            role=role,
            max_model_len=max_model_len,
            page_size=page_size,
            num_usable_pages=pages.num_usable,
            num_lookahead=num_lookahead,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            read_tokens=config.max_num_kv_read_tokens,
        )
        self._config = config
        self._table = SequenceTable(
            pages=pages,
            slots=Slots(config.max_num_seqs),
            host=HostMemory(host_tokens),
            is_decode_worker=role is Role.DECODE,
            refetch_retracted=role is Role.DECODE and not local_prefill,
        )
        reserve = None if role is Role.PREFILL else config.reserved_decode_tokens
        self._admission = Admission(self._table, reserve, max_model_len)
        self._rows = RowPlanner(self._table, config, self._limits)
        self._starter = Starter(self._table, self._admission, self._rows, config)
        self._committer = Committer(self._table, role)
        self._steps = StepsInFlight()
        self._arrivals = Arrivals(self._table, self._admission, self._committer, config, self._limits)

    # --- requests come and go

    def add(
        self,
        request: EngineRequest,
        now_s: float,
        *,
        remote: bool = False,
        goes_on: bool = False,
        kept: int = 0,
    ) -> None:
        """Queue a request. `remote`: its KV comes from a peer; leading tokens found in the prefix index are pinned and need not
        be sent, pages are reserved after `peer_ready`. `goes_on`: its client has some of the answer, though `request` may have
        no generated tokens: a full queue takes it. `kept`: free places for others.

        Raises InvalidRequest (it could never run; the message has the number to use), Overloaded (queue full, or its turn
        would come too late; says when to come again), Unavailable (draining). After an error nothing is kept.
        """
        self._arrivals.add(request, now_s, remote=remote, goes_on=goes_on, kept=kept)

    def awaits_peer(self, request_id: str) -> bool:
        """Whether to ask a peer for it now: it was not over when it came, and gets no KV from another choice of its group."""
        sequence = self._table.live.get(request_id)
        return sequence is not None and sequence.status is not Status.FORKING

    def held_tokens(self, request_id: str) -> int:
        """Leading tokens whose KV is here: pinned ones of a remote sequence, computed ones of any other, and for one that
        waits to be computed what the prefix index would give now."""
        sequence = self._table.live.get(request_id)
        if sequence is None:
            return 0
        if sequence.status is Status.WAITING:
            return len(self._admission.find_prefix(sequence)) * self._limits.page_size
        return sequence.holding.held_tokens or sequence.num_computed

    def peer_ready(self, request_id: str, is_ready: bool = True) -> None:
        """Whether the peer of a remote sequence has begun with it: only then may pages be reserved here."""
        if sequence := self._table.live.get(request_id):
            sequence.wait.is_open = is_ready

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds, in any state, at once; no output follows. P: so ends its hand-off, too, and its
        pages belong to the prefix cache."""
        self._arrivals.forget(request_id)
        if sequence := self._table.live.get(request_id):
            self._table.end(sequence)

    def fail(self, request_id: str, error: RequestError) -> Output | None:
        """The same with a last output; None when the request is unknown or has had its last output."""
        sequence = self._table.live.get(request_id)
        return None if sequence is None else self._committer.failure(sequence, error)

    def park(self, request_ids: tuple[str, ...]) -> str | None:
        """P: of these, the computed prompt whose turn comes last gives its pages to those that wait, until `unpark`. Returns
        its id, None when none of them has pages and its token."""
        return self._table.park(frozenset(request_ids))

    def unpark(self, request_id: str) -> None:
        """P: the parked request waits again, at its place by arrival, and nobody passes it; its token is sampled again."""
        sequence = self._table.live.get(request_id)
        if sequence is not None and sequence.status is Status.PARKED:
            self._table.move(sequence, Status.WAITING)

    def expire(self, now_s: float) -> list[Output]:
        """Last outputs that need no step: deadlines passed, and resumed requests that were complete when they came."""
        return self._arrivals.expire(now_s)

    # --- steps

    def schedule(self, now_s: float) -> Plan:
        """Decide the next step: running sequences, then whoever can start, all in the order of (rank, arrival) and within one
        token budget and one read budget. An empty plan is not dispatched and needs no commit."""
        table = self._table
        table.preempted.clear()
        # Asked before the step is drafted: its pages are copied before its chunks are computed.
        donors = table.groups.donors(table.queues)
        draft = self._rows.draft()
        self._starter.start(draft, donors)
        table.reads_left = draft.reads
        evicted, forgotten = table.slots.take_evictions(), table.host.take_forgotten()
        plan = draft.freeze(self._steps.next_id, evicted, self._limits.num_lookahead, forgotten)
        table.stats.prefill_tokens += sum(len(chunk.token_ids) for chunk in plan.prefill)
        table.stats.decode_tokens += len(plan.decode) * plan.num_steps
        self._steps.start(plan, draft.rows)
        self._arrivals.planned(now_s)
        return plan

    def commit(self, result: StepResult) -> list[Output]:
        """Take a dispatched step's results in, in order of dispatch, at any time later."""
        return self._committer.commit(self._steps.finish(result.step_id), result)

    def kv_of_failed(self, step_id: int, sampled: Sampled) -> tuple[PageTable, int] | None:
        """Page table and tokens of KV that a step in flight leaves to a request that fails for `sampled`; None if none does."""
        row = self._steps.row(step_id, sampled.slot)
        if row is None or not self._committer.fails(row, sampled):
            return None
        return row.sequence.holding.page_table, row.end

    # --- remote sequences (D)

    def take_reserved(self) -> list[Reserved]:
        """Remote sequences that got pages since the last call and still have them."""
        return self._table.take_reserved()

    def take_retracted(self) -> list[EngineRequest]:
        """Sequences in PREALLOC that lost their KV since the last call: open their hand-off again, then ask for more. A pin
        that blocks everybody is lifted first."""
        self._admission.lift_pin()
        return self._table.take_retracted()

    def page_table(self, request_id: str) -> PageTable:
        """Pages of a live request, per KV group, in token order."""
        return self._table.live[request_id].holding.page_table

    def remote_first_token(self, request_id: str, first: Output) -> Output:
        """The peer sampled the first token: returns the client's output. With `finish` set the request is over and freed."""
        sequence = self._table.live[request_id]
        assert sequence.status in (Status.PREALLOC, Status.TRANSFER), (
            f"first token for {request_id} while {sequence.status.value}"
        )
        return self._committer.take_first(sequence, first)

    def kv_arrived(self, request_id: str) -> None:
        """All KV is in the pages (scattered, or dispatched to be): TRANSFER -> READY. The first token must be known."""
        self._table.kv_arrived(self._table.live[request_id])

    def compute_locally(self, request_id: str, held_tokens: int = 0) -> bool:
        """Give up on the peer: the sequence waits, at its place by arrival, to be prefilled here. Tokens it has stay. KV of its
        first `held_tokens` tokens has arrived: with prefix caching its full pages need not be computed, if they are still
        there when its turn comes. True when the request goes on without its peer, False when it is unknown or finished."""
        sequence = self._table.live.get(request_id)
        if sequence is None or sequence.status is Status.PUBLISHING:
            return False
        if sequence.status in (Status.PREALLOC, Status.TRANSFER):
            self._table.compute_here(sequence, held_tokens)
        return True

    def fetch_first(self, request_id: str, held_limit: int) -> None:
        """The other way: a sequence that waits to be computed here has KV come from a peer, which has begun, before that. It
        keeps its place; what of its first `held_limit` tokens is found here is pinned. Ignored in any other state."""
        sequence = self._table.live.get(request_id)
        if sequence is not None and sequence.status is Status.WAITING:
            self._admission.fetch(sequence, held_limit)

    # --- views and upkeep

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted go on to their end."""
        self._arrivals.is_draining = True

    def is_idle(self) -> bool:
        """Nothing lives, is in flight, is left to say, or has to be told to the device."""
        device_behind = self._table.slots.has_evictions or self._table.host.has_forgotten
        return not (self._table.live or len(self._steps) or device_behind or self._arrivals.has_complete)

    def reset_prefix_cache(self) -> int:
        """Forget all shared prefixes; returns the pages forgotten. Requests that are here now go on, and leave none behind."""
        return self._table.pages.reset_index(sequence.holding for sequence in self._table.live.values())

    def kv_journal(self) -> PrefixJournal:
        """From now on every change of the prefix cache is written down here, to be taken once per tick. Call once, at start."""
        return self._table.pages.journal()

    @property
    def num_pages(self) -> int:
        """Usable pages of the pool."""
        return self._limits.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._table.pages.num_free

    @property
    def num_host_tokens(self) -> int:
        """Tokens whose KV is kept in host memory."""
        return self._table.host.used_tokens

    @property
    def stats(self) -> Stats:
        """Counters since start."""
        return self._table.stats

    @property
    def preempted(self) -> tuple[Preempted, ...]:
        """Sequences that the latest plan took pages from."""
        return tuple(self._table.preempted)

    def counts(self) -> dict[str, int]:
        """Live sequences by status."""
        return {status.value: len(queue) for status, queue in self._table.queues.items()}

    @property
    def pending_prefill_tokens(self) -> int:
        """Tokens to be computed for those who wait or run, as far as no step does that yet; cost grows with their number."""
        statuses = (Status.WAITING, Status.RUNNING)
        return sum(max(0, s.target - s.num_scheduled) for status in statuses for s in self._table.queues[status])

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state for people: every live sequence, pages, counters."""
        return snapshot(self._table) | {"steps_in_flight": len(self._steps), "draining": self._arrivals.is_draining}

    def check(self) -> None:
        """Assert the invariants of pages, slots and queues; cost grows with the pool."""
        self._table.check()
