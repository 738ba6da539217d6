"""All live sequences of one worker: who is in which state, and the one way out of each."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.requests import EngineRequest
from jdisagg.sched.forks import ForkGroups
from jdisagg.sched.host_memory import HostMemory
from jdisagg.sched.pages import PageBook
from jdisagg.sched.plan import HostCopy, PageTable
from jdisagg.sched.queue import SequenceQueue
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.slots import Slots
from jdisagg.sched.states import LIVE, Status, check_transition


@dataclass(slots=True)
class Stats:
    """Counters since start."""

    preemptions: int = 0  # KV dropped for lack of pages, to be recomputed here
    retractions: int = 0  # the same on a decode worker, however it is recovered
    prefix_hit_tokens: int = 0  # prompt tokens not computed (or not fetched) because their pages were found
    prefix_query_tokens: int = 0  # prompt tokens looked up
    refound_tokens: int = 0  # of preempted sequences, outputs included: found again when they came back
    prefill_tokens: int = 0  # scheduled in chunks
    decode_tokens: int = 0  # scheduled as decode rows
    served: int = 0  # got a slot, again after a preemption, or their only token from a peer
    forks: int = 0  # choices that took a sibling's prompt KV
    offloaded_tokens: int = 0  # of preempted and retracted sequences, to host memory
    restored_tokens: int = 0  # and back


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


class SequenceTable:
    """State changes of sequences. Every exit from memory goes through `end`, `preempt`, `park`, `compute_here` or `unpin`."""

    def __init__(
        self, *, pages: PageBook, slots: Slots, host: HostMemory, is_decode_worker: bool, refetch_retracted: bool
    ) -> None:
        self.pages = pages
        self.slots = slots
        self.host = host
        self.groups = ForkGroups()
        self.stats = Stats()
        self.live: dict[str, Sequence] = {}
        self.queues = {status: SequenceQueue() for status in LIVE}
        self.retracted: list[Sequence] = []  # back in PREALLOC, their hand-off has to be opened again
        self.reads_left = float("inf")  # of the latest step's read budget
        self.reserved: list[Sequence] = []  # just got pages for KV that a peer will send
        self.preempted: list[Preempted] = []  # by the latest plan
        self._is_decode_worker = is_decode_worker
        self.refetches_retracted = refetch_retracted

    def add(self, sequence: Sequence) -> None:
        """Enter in the status it was made with."""
        self.live[sequence.request_id] = sequence
        self.groups.add(sequence)
        self.queues[sequence.status].add(sequence)

    def move(self, sequence: Sequence, status: Status) -> None:
        """Change status; IllegalTransition when the table does not lead there."""
        check_transition(sequence.request_id, sequence.status, status)
        self.queues[sequence.status].remove(sequence)
        sequence.status = status
        if status is Status.FINISHED:
            del self.live[sequence.request_id]
        else:
            self.queues[status].add(sequence)

    def end(self, sequence: Sequence) -> None:
        """The one release path of finish, cancel, time-out and failure: pages and slot are free, late results are void."""
        sequence.epoch += 1
        self.pages.drop(sequence.holding)
        self.host.drop(sequence)
        self.vacate(sequence)
        self.move(sequence, Status.FINISHED)
        if (heir := self.groups.remove(sequence)) is not None:
            self._lead(heir)

    def preempt(self, sequence: Sequence, wanted_by: Sequence) -> HostCopy | None:
        """Take pages and slot away for `wanted_by`; the tokens stay. Their KV goes to host memory when a copy is returned (to
        be made before anything else is written), else it is computed or fetched again."""
        self.preempted.append(Preempted(sequence.request_id, wanted_by.request_id, len(sequence.holding.pages)))
        if self._is_decode_worker:
            self.stats.retractions += 1
        else:
            self.stats.preemptions += 1
        copy = self._copy_out(sequence)
        sequence.wait.was_preempted = True
        self._strip(sequence)
        if copy is None and self.refetches_retracted:
            self.move(sequence, Status.PREALLOC)
            self._ask_anew(sequence)
        else:
            self.move(sequence, Status.WAITING)
        return copy

    def park(self, request_ids: frozenset[str]) -> str | None:
        """P: of these, the computed prompt whose turn comes last gives its pages to those that wait, to be computed again
        later. Returns its id."""
        published = self.queues[Status.PUBLISHING]
        parkable = [s for s in published if s.request_id in request_ids and not s.told.is_final]
        if not parkable:
            return None
        last = parkable[-1]
        self.stats.preemptions += 1
        del last.generated[len(last.request.generated_token_ids) :]
        last.wait.was_preempted = True
        self._strip(last)
        self.move(last, Status.PARKED)
        return last.request_id

    def kv_arrived(self, sequence: Sequence) -> None:
        """All KV of a remote sequence is in its pages: TRANSFER -> READY."""
        request_id = sequence.request_id
        assert sequence.num_known > sequence.target, f"KV of {request_id} is complete before its first token is known"
        self.move(sequence, Status.READY)
        sequence.num_computed = sequence.num_scheduled = sequence.target
        self.pages.cache_full_pages(sequence)

    def compute_here(self, sequence: Sequence, held_tokens: int) -> None:
        """A remote sequence (PREALLOC or TRANSFER) will be prefilled by this worker; what has arrived is left to be found."""
        pinned = sequence.holding.held_tokens
        if sequence.told.cached_tokens is None and held_tokens > pinned:  # what its peer sent will be found, and is no cache's
            sequence.told.cached_tokens = min(pinned, len(sequence.request.prompt_token_ids))
        sequence.num_computed = min(held_tokens, len(sequence.holding.pages) * self.pages.page_size)
        self.pages.cache_full_pages(sequence)
        self._strip(sequence)
        self.move(sequence, Status.WAITING)

    def unpin(self, sequence: Sequence) -> None:
        """A remote sequence that waits for its peer gives up what was found for it, and asks anew for all of its KV."""
        self._strip(sequence)
        self._ask_anew(sequence)

    def take_reserved(self) -> list[Reserved]:
        """Empties the list of remote sequences that got pages; who lost them since is left out."""
        taken, self.reserved = self.reserved, []
        return [
            Reserved(s.request_id, s.holding.page_table, s.holding.held_tokens, s.target)
            for s in taken
            if s.status is Status.TRANSFER
        ]

    def take_retracted(self) -> list[EngineRequest]:
        """Empties the list of those whose hand-off has to be opened again; who needs none any more is left out."""
        taken, self.retracted = self.retracted, []
        return [s.resumed_request() for s in taken if s.status is Status.PREALLOC]

    def vacate(self, sequence: Sequence) -> None:
        """Give its slot back, when it has one."""
        if sequence.slot is not None:
            self.slots.give_back(sequence.slot)
            sequence.slot = None

    def later_victim(self) -> Sequence | None:
        """Who loses pages first: of those with KV in place, the last by (rank, arrival)."""
        last = [s for s in (self.queues[Status.RUNNING].last, self.queues[Status.READY].last) if s is not None]
        return max(last, key=lambda s: s.order) if last else None

    @property
    def someone_holds_memory(self) -> bool:
        """Somebody will free pages by going on (pins of sequences that wait for memory do not count)."""
        return any(self.queues[s] for s in (Status.RUNNING, Status.READY, Status.TRANSFER, Status.PUBLISHING))

    def check(self) -> None:
        """Assert that pages, slots, host memory and queues are exactly those of the live sequences."""
        live = self.live.values()
        self.pages.check(s.holding for s in live)
        slots = [s.slot for s in live if s.slot is not None]
        assert len(set(slots)) == len(slots) == len(self.queues[Status.RUNNING]), "slots and running sequences do not match"
        assert len(slots) + self.slots.num_free == self.slots.num_slots, "a slot is lost"
        kept = sum(s.wait.host_tokens for s in live)
        assert kept == self.host.used_tokens, f"{self.host.used_tokens} tokens on the host, {kept} of live sequences"
        assert sum(len(q) for q in self.queues.values()) == len(self.live), "a sequence is in no queue or in two"

    def _copy_out(self, sequence: Sequence) -> HostCopy | None:
        """Only what can go on decoding at once when it is back: everything known but the last token is computed, and nothing
        of the prompt has to be computed again for its log-probabilities."""
        num_tokens = sequence.num_computed
        if num_tokens != sequence.num_known - 1 or sequence.wants_prompt_logprobs:
            return None
        if not self.host.keep(sequence, num_tokens):
            return None
        self.stats.offloaded_tokens += num_tokens
        num_pages = self.pages.pages_for(num_tokens)
        table = (tuple(sequence.holding.pages[:num_pages]),)
        return HostCopy(key=sequence.request_id, page_table=table, num_tokens=num_tokens)

    def _lead(self, sequence: Sequence) -> None:
        """A choice that waited for a sibling which is gone is computed, or fetched, itself."""
        self.move(sequence, Status.PREALLOC if sequence.wait.is_remote else Status.WAITING)
        if sequence.wait.is_remote:
            self._ask_anew(sequence)

    def _ask_anew(self, sequence: Sequence) -> None:
        sequence.wait.is_open = False  # no peer has begun with it
        self.retracted.append(sequence)

    def _strip(self, sequence: Sequence) -> None:
        self.pages.drop(sequence.holding)
        self.vacate(sequence)
        sequence.forget_computed()
