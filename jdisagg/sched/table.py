"""All live sequences of one worker: who is in which state, and the one way out of each."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.sched.pages import PageBook
from jdisagg.sched.queue import SequenceQueue
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.slots import Slots
from jdisagg.sched.states import LIVE, Status, check_transition
from jdisagg.sched.views import Preempted


@dataclass(slots=True)
class Stats:
    """Counters since start."""

    preemptions: int = 0  # KV dropped for lack of pages, to be recomputed here
    retractions: int = 0  # the same on a decode worker, however it is recovered
    prefix_hit_tokens: int = 0  # prompt tokens not computed (or not fetched) because their pages were found
    prefix_query_tokens: int = 0  # prompt tokens looked up
    prefill_tokens: int = 0  # scheduled in chunks
    decode_tokens: int = 0  # scheduled as decode rows


class SequenceTable:
    """State changes of sequences. Every exit from memory goes through `end` or `preempt`."""

    def __init__(self, *, pages: PageBook, slots: Slots, is_decode_worker: bool, refetch_retracted: bool) -> None:
        self.pages = pages
        self.slots = slots
        self.stats = Stats()
        self.live: dict[str, Sequence] = {}
        self.queues = {status: SequenceQueue() for status in LIVE}
        self.retracted: list[Sequence] = []  # back in PREALLOC, their hand-off has to be opened again
        self.reserved: list[Sequence] = []  # just got pages for KV that a peer will send
        self.preempted: list[Preempted] = []  # by the latest plan
        self._is_decode_worker = is_decode_worker
        self._refetch_retracted = refetch_retracted

    def add(self, sequence: Sequence) -> None:
        """Enter in the status it was made with."""
        self.live[sequence.request_id] = sequence
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
        self.vacate(sequence)
        self.move(sequence, Status.FINISHED)

    def preempt(self, sequence: Sequence, wanted_by: Sequence) -> None:
        """Take pages and slot away for `wanted_by`; the tokens stay, their KV is computed or fetched again."""
        self.preempted.append(Preempted(sequence.request_id, wanted_by.request_id, len(sequence.holding.pages)))
        if self._is_decode_worker:
            self.stats.retractions += 1
        else:
            self.stats.preemptions += 1
        self._strip(sequence)
        self.move(sequence, Status.PREALLOC if self._refetch_retracted else Status.WAITING)
        if self._refetch_retracted:
            self.retracted.append(sequence)

    def compute_here(self, sequence: Sequence) -> None:
        """A remote sequence (PREALLOC or TRANSFER) will be prefilled by this worker."""
        self._strip(sequence)
        self.move(sequence, Status.WAITING)

    def vacate(self, sequence: Sequence) -> None:
        """Give its slot back, when it has one."""
        if sequence.slot is not None:
            self.slots.give_back(sequence.slot)
            sequence.slot = None

    def later_victim(self) -> Sequence | None:
        """Who loses pages first: of those with KV in place, the last by (priority, arrival)."""
        last = [s for s in (self.queues[Status.RUNNING].last, self.queues[Status.READY].last) if s is not None]
        return max(last, key=lambda s: s.order) if last else None

    def outstanding_pages(self) -> int:
        """Pages that were promised at admission and not taken yet."""
        statuses = (Status.RUNNING, Status.READY, Status.TRANSFER)
        return sum(s.holding.outstanding_pages for status in statuses for s in self.queues[status])

    @property
    def someone_holds_memory(self) -> bool:
        """Somebody will free pages by going on (pins of sequences that wait for memory do not count)."""
        return any(self.queues[s] for s in (Status.RUNNING, Status.READY, Status.TRANSFER, Status.PUBLISHING))

    def _strip(self, sequence: Sequence) -> None:
        self.pages.drop(sequence.holding)
        self.vacate(sequence)
        sequence.forget_computed()
