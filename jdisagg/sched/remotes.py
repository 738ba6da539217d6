"""Sequences whose KV comes from a peer: their way from the first hello to the pages, or back to being computed here."""

from __future__ import annotations

from jdisagg.core.requests import EngineRequest, Output
from jdisagg.sched.admission import Admission
from jdisagg.sched.committer import Committer
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from jdisagg.sched.table import SequenceTable
from jdisagg.sched.views import Reserved


class Remotes:
    """What a decode worker's hand-offs tell its scheduler; the methods are as those of Scheduler."""

    def __init__(self, table: SequenceTable, admission: Admission, committer: Committer) -> None:
        self._table = table
        self._admission = admission
        self._committer = committer

    def awaits_peer(self, request_id: str) -> bool:
        """A choice that forks from its sibling awaits nobody."""
        sequence = self._find(request_id)
        return sequence is not None and sequence.status is not Status.FORKING

    def peer_ready(self, request_id: str, is_ready: bool) -> None:
        """Opens or shuts the gate to memory."""
        if sequence := self._find(request_id):
            sequence.wait.is_open = is_ready

    def take_reserved(self) -> list[Reserved]:
        """Empties the list that admission fills; who lost the pages since is left out."""
        taken, self._table.reserved = self._table.reserved, []
        return [
            Reserved(s.request_id, (tuple(s.holding.pages),), s.holding.held_tokens, s.target)
            for s in taken
            if s.status is Status.TRANSFER
        ]

    def take_retracted(self) -> list[EngineRequest]:
        """Empties the list of those that lost their KV; a pin that blocks everybody is lifted first, which may add to it."""
        self._admission.lift_pin()
        taken, self._table.retracted = self._table.retracted, []
        return [s.resumed_request() for s in taken if s.status is Status.PREALLOC]

    def first_token(self, request_id: str, first: Output) -> Output:
        """PREALLOC or TRANSFER, and stays so unless `first` ends the request."""
        sequence = self._table.live[request_id]
        assert sequence.status in (Status.PREALLOC, Status.TRANSFER), (
            f"first token for {request_id} while {sequence.status.value}"
        )
        return self._committer.take_first(sequence, first)

    def kv_arrived(self, request_id: str) -> None:
        """TRANSFER -> READY."""
        sequence = self._table.live[request_id]
        assert sequence.num_known > sequence.target, f"KV of {request_id} is complete before its first token is known"
        self._table.move(sequence, Status.READY)
        sequence.num_computed = sequence.num_scheduled = sequence.target
        self._table.pages.publish(sequence)

    def compute_locally(self, request_id: str, held_tokens: int) -> bool:
        """PREALLOC or TRANSFER -> WAITING."""
        sequence = self._find(request_id)
        if sequence is None or sequence.status is Status.PUBLISHING:
            return False
        if sequence.status in (Status.PREALLOC, Status.TRANSFER):
            self._table.compute_here(sequence, held_tokens)
        return True

    def fetch_first(self, request_id: str, held_limit: int) -> None:
        """WAITING -> PREALLOC."""
        sequence = self._find(request_id)
        if sequence is not None and sequence.status is Status.WAITING:
            assert not sequence.wait.host_tokens, f"{request_id} has KV in host memory"
            self._table.move(sequence, Status.PREALLOC)
            sequence.wait.is_remote = True
            self._admission.pin_prefix(sequence, held_limit)

    def _find(self, request_id: str) -> Sequence | None:
        return self._table.live.get(request_id)
