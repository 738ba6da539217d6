"""The gate in front of the KV pool: who may take memory, and what of it is there already.

A sequence gets in when its known tokens and the start of its output fit into free pages minus those promised to sequences
admitted before and not yet taken (`PageBook.num_unpromised`). So a decode loses its pages only when its output, or that of one
whose turn is before its own, outgrows `reserved_decode_tokens`.
"""

from __future__ import annotations

from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable

MIN_ROOM = 3  # tokens: two steps are planned before the first one's token is seen, else it is set back with nothing gained
MAX_WAITING_WEIGHED = 64  # longest queue gone through for one pin


class Admission:
    """Reserves pages for sequences that hold none (or only pins). `reserved_decode_tokens` None: no decode follows here."""

    def __init__(self, table: SequenceTable, reserved_decode_tokens: int | None, max_model_len: int) -> None:
        self._table = table
        self._most_pages = table.pages.pages_for(max_model_len)  # of any one sequence
        self._reserved_decode_tokens = reserved_decode_tokens

    def take_memory(self, sequence: Sequence) -> bool:
        """Reserve pages of all tokens known so far; the gate also keeps room for the start of the output."""
        pages = self._table.pages
        total = pages.pages_for(self.gate_tokens(sequence))
        hits = self._hits(sequence, least=total - pages.num_unpromised)
        if self._cost(sequence, hits, total) > pages.num_unpromised:
            return False
        if sequence.wait.host_tokens:
            sequence.continue_from(sequence.wait.host_tokens)
        elif sequence.status is not Status.PREALLOC:
            pages.pin(sequence.holding, hits)
            self._skip_computed(sequence, len(hits) * pages.page_size)
        self._reserve(sequence, total)
        return True

    def weigh_host_copy(self, sequence: Sequence) -> None:
        """KV on the host comes back into pages of its own. Where too few are free, but would do beside the pages that hold its
        beginning, the copy is let go: the rest is computed again, sooner than the sequence, whom nobody passes, could go on.
        To be asked only when that can begin in this step: whoever frees a slot frees pages with it."""
        if not sequence.wait.host_tokens or self._table.refetches_retracted:  # where nothing is computed
            return
        total, room = self._table.pages.pages_for(self.gate_tokens(sequence)), self._table.pages.num_unpromised
        if self._cost(sequence, (), total) > room >= self._cost(sequence, self.find_prefix(sequence), total):
            self._table.host.drop(sequence)

    def share_memory(self, child: Sequence, donor: Sequence) -> bool:
        """Reserve pages for a choice beside the sibling whose prompt it has: its full pages are shared, up to the prompt's last
        token, which the child feeds itself. The caller copies the page in between when there is one."""
        pages = self._table.pages
        if self.needs(child) > pages.num_unpromised:
            return False
        pages.share(child.holding, donor.holding, self._num_shared(child))
        self._reserve(child, pages.pages_for(self.gate_tokens(child)))
        child.continue_from(child.num_known - 1)
        child.told.cached_tokens = child.num_computed
        return True

    def needs(self, sequence: Sequence) -> int:
        """Free pages, beside those promised to others, that a sequence without memory wants before it gets any."""
        total = self._table.pages.pages_for(self.gate_tokens(sequence))
        if sequence.status is Status.FORKING:
            return total - self._num_shared(sequence)
        return self._cost(sequence, self._hits(sequence), total)

    def gate_tokens(self, sequence: Sequence, num_coming: int = 0) -> int:
        """Tokens for which there must be room before this sequence gets any memory, once `num_coming` more are known."""
        if self._reserved_decode_tokens is None:
            return sequence.target
        num_known = sequence.num_known + num_coming
        least = MIN_ROOM if sequence.wait.was_preempted else 0
        more = min(sequence.max_len - num_known, max(least, self._reserved_decode_tokens))
        return max(num_known, num_known + more - 1)

    def lift_pin(self) -> None:
        """Nobody runs short of, or waits for, memory that only pins take up whose owners cannot go on either. One at a time:
        where that one ends its stream, what others lend may be read."""
        if (sequence := self.pin_in_the_way()) is not None:
            self._table.unpin(sequence)

    def pin_in_the_way(self) -> Sequence | None:
        """Who is to give up its pins: the last of those whose peers have not begun, which may take long. Only where those who
        run would lose theirs instead, and one of its pages is its alone, or nobody holds memory and whoever could take it finds
        too little beside the pins."""
        queues, runs_short = self._table.queues, self._runs_short
        if self._table.someone_holds_memory and not runs_short:
            return None
        prealloc = list(queues[Status.PREALLOC])
        closed = (s for s in reversed(prealloc) if s.holding.pages and not s.wait.is_open)
        if runs_short:  # what prompts share comes first in them
            return next((s for s in closed if self._table.pages.is_unshared(s.holding.pages[-1])), None)
        last = next(closed, None)
        local, remote = queues[Status.WAITING].at(0), next((s for s in prealloc if s.wait.is_open), None)
        first = min((s for s in (local, remote) if s is not None), key=lambda s: s.order, default=None)
        return last if first is not None and self.needs(first) > self._table.pages.num_free else None

    @property
    def _runs_short(self) -> bool:
        """Those who run want more pages for their next tokens than are free: in the next step one would lose its own."""
        running, pages = self._table.queues[Status.RUNNING], self._table.pages
        if len(running) <= pages.num_free:  # as a rule; then nobody is looked at
            return False
        going_on = [s for s in running if s.num_wanted > 0]
        return sum(pages.pages_for(s.num_known + s.num_in_flight) > len(s.holding.pages) for s in going_on) > pages.num_free

    def find_prefix(self, sequence: Sequence, *, least: int = 0) -> tuple[int, ...]:
        """At least one token stays to be computed, for its logits; prompt log-probabilities need every position computed.
        Fewer pages than `least` may be told as none."""
        if sequence.wants_prompt_logprobs:
            return ()
        return self._table.pages.find(sequence, sequence.target - 1, least=least)

    def _reserve(self, sequence: Sequence, total: int) -> None:
        """Take the pages of what is known, and have the rest of `total` kept for it."""
        pages = self._table.pages
        grown = pages.grow(sequence.holding, pages.pages_for(sequence.num_known))
        assert grown is not None, f"the gate let {sequence.request_id} in, which does not fit"
        pages.set_aside(sequence.holding, total)

    def _hits(self, sequence: Sequence, *, least: int = 0) -> tuple[int, ...]:
        """Pages it would take over: one that fetches has pinned them, one whose KV is on the host has it all."""
        is_here = sequence.status is Status.PREALLOC or sequence.wait.host_tokens
        return () if is_here else self.find_prefix(sequence, least=least)

    def _cost(self, sequence: Sequence, hits: tuple[int, ...], total: int) -> int:
        """Free pages that a sequence without memory needs to have `total`."""
        return self._table.pages.cost(hits, total) - len(sequence.holding.pages)

    def _num_shared(self, child: Sequence) -> int:
        """Full pages of the prompt that a choice shares with its sibling; it feeds the prompt's last token itself."""
        return (child.num_known - 1) // self._table.pages.page_size

    def _skip_computed(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed = sequence.num_scheduled = num_tokens
        self._count(sequence, num_tokens)
        if sequence.wait.was_preempted:
            self._table.stats.refound_tokens += num_tokens
        if sequence.told.cached_tokens is None:
            sequence.told.cached_tokens = min(num_tokens, len(sequence.request.prompt_token_ids))

    def _count(self, sequence: Sequence, num_found: int) -> None:
        """A prompt counts once, when it is first looked up: not again after a preemption, nor when it is computed where a part
        of it was pinned."""
        if not sequence.told.was_looked_up:
            sequence.told.was_looked_up = True
            num_prompt = len(sequence.request.prompt_token_ids)
            self._table.stats.prefix_query_tokens += num_prompt
            self._table.stats.prefix_hit_tokens += min(num_found, num_prompt)

    def fetch(self, sequence: Sequence, held_limit: int) -> None:
        """A sequence that waits to be computed has KV come from a peer before that: WAITING -> PREALLOC."""
        assert not sequence.wait.host_tokens, f"{sequence.request_id} has KV in host memory"
        self._table.move(sequence, Status.PREALLOC)
        sequence.wait.is_remote = True
        self.pin_prefix(sequence, held_limit)

    def pin_prefix(self, sequence: Sequence, held_limit: int | None = None) -> None:
        """Pin what is found, but no page that others were promised, which would cost a running sequence its own, and never so
        much that a waiting sequence could not fit beside all pins: they would deadlock."""
        pages = self._table.pages
        limit = sequence.target if held_limit is None else min(held_limit, sequence.target)
        hits = pages.find(sequence, limit)
        if hits and self._may_pin(sequence, hits):
            pages.pin(sequence.holding, hits)
            sequence.holding.held_tokens = len(hits) * pages.page_size
        self._count(sequence, sequence.holding.held_tokens)

    def _may_pin(self, sequence: Sequence, hits: tuple[int, ...]) -> bool:
        pages = self._table.pages
        if pages.cost(hits, len(hits)) > pages.num_unpromised:
            return False
        has_plenty = len(hits) + self._most_pages <= pages.num_free
        return has_plenty or self._fits_beside_pins(sequence, len(hits))

    def _fits_beside_pins(self, sequence: Sequence, num_hits: int) -> bool:
        """Exactly, for a pool that is nearly full. Behind a long queue nothing is pinned: weighing it would take too long."""
        pages, table = self._table.pages, self._table
        if len(table.queues[Status.PREALLOC]) + len(table.queues[Status.WAITING]) > MAX_WAITING_WEIGHED:
            return False
        waiting = [*table.queues[Status.PREALLOC], *table.queues[Status.WAITING], sequence]
        pinned = num_hits + sum(len(s.holding.pages) for s in waiting)
        own = {id(sequence): num_hits}
        needed = [self.gate_tokens(s, num_coming=_is_first_coming(s)) for s in waiting]
        largest = max(
            pages.pages_for(num) - own.get(id(s), len(s.holding.pages)) for num, s in zip(needed, waiting, strict=True)
        )
        return pinned + largest <= pages.num_usable


def _is_first_coming(sequence: Sequence) -> bool:
    """Its peer may tell its first token before there is memory here, and that is not its last one."""
    has_none = sequence.status is Status.PREALLOC and sequence.num_known == sequence.target
    return has_none and sequence.max_len > sequence.num_known + 1
