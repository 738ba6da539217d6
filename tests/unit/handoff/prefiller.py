"""A prefill worker of the hand-off tests, small enough to be stepped by hand.

It executes actions as its role does and checks what must hold at every one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Overloaded
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.handoff import actions as act
from jdisagg.handoff.borrower import LONGEST_S, Borrowed, Borrower, BorrowerAction
from jdisagg.handoff.credit import most_pieces_of
from jdisagg.handoff.messages import HandoffId, StreamEnded
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.sched.stops import find_stop, stop_ids
from tests.unit.handoff.loans import Loans
from tests.unit.handoff.parties import Stream
from tests.unit.handoff.rig import BPT, ready

EOS = 8


class Prefiller:
    """One prefill worker: its side, its engine's requests, what it has published, and what it borrows."""

    def __init__(
        self, peer: str, config: TransferConfig, keys: Iterator[int], streams: Mapping[HandoffId, Stream], loans: Loans
    ) -> None:
        self.config, self.streams, self.loans = config, streams, loans
        self.side = PrefillSide(config, bytes_per_token=BPT, new_key=lambda: f"{peer}-{next(keys)}")
        self.engine: dict[str, EngineRequest] = {}
        self.requests: dict[str, EngineRequest] = {}  # all it was ever asked
        self.computed: dict[str, int] = {}
        self.exporting: list[act.Export] = []
        self.held_bytes: dict[str, int] = {}
        self.on_device: dict[str, int] = {}  # tokens, padding included
        self.keeps_on_device = peer == "p0"  # what it publishes: padded to one token, or to a chunk
        self.ranges: dict[str, tuple[int, int]] = {}
        self.credit: dict[HandoffId, int] = {}
        self.spent: dict[HandoffId, int] = {}
        self.full: bool = False
        self.borrower = Borrower(config, bytes_per_token=BPT)
        self.borrowing: dict[str, HandoffId] = {}  # engine requests whose pages are still to come, or KV
        self.in_place: dict[str, set[int]] = {}  # what each of them has
        self.arriving: str | None = None

    @property
    def unreserved(self) -> list[str]:
        """Borrowing requests that wait for pages."""
        return [engine_id for engine_id, state in self.borrower.snapshot().items() if not state["reserved"]]

    def run(self, actions: Sequence[act.PrefillAction], now_s: float) -> None:
        for action in actions:
            match action:
                case act.Admit(handoff=handoff, request=request):
                    if self.full:
                        self.run(self.side.on_refused(handoff, Overloaded("full")), now_s)
                    else:
                        assert request.request_id not in self.engine
                        self.engine[request.request_id] = self.requests[request.request_id] = request
                        self.computed[request.request_id] = 0
                        if self.borrow(action):
                            del self.engine[request.request_id]
                        self.run(self.side.on_admitted(handoff, 0), now_s)
                case act.Reply(handoff=handoff, message=message):
                    self.streams[handoff].up.append(message)
                case act.CloseReply(handoff=handoff):
                    stream = self.streams[handoff]
                    if stream.open_at_prefill:
                        stream.open_at_prefill = False
                        stream.up.append(StreamEnded(reason="closed"))
                case act.Export(handoff=handoff, engine_request_id=engine_id, begin=begin, end=end, key=key):
                    assert end <= self.computed[engine_id], "only what is computed"
                    assert 0 < end - begin <= self.config.transfer_chunk_tokens
                    size = (end - begin) * BPT
                    self.spent[handoff] = self.spent.get(handoff, 0) + size
                    assert self.spent[handoff] <= self.credit[handoff], "credit is never exceeded"
                    self.ranges[key] = (begin, end)
                    self.held_bytes[key] = size
                    held = sum(self.held_bytes.values())
                    assert held <= self.config.transfer_buffer_bytes or len(self.held_bytes) == 1, "bounded buffer"
                    self.on_device[key] = chunk_tokens = self.config.transfer_chunk_tokens
                    most_tokens = most_pieces_of(self.config, BPT) * chunk_tokens
                    assert sum(self.on_device.values()) <= most_tokens, "bounded device"
                    self.exporting.append(action)
                case act.Discard(key=key):
                    self.held_bytes.pop(key, None)
                    self.on_device.pop(key, None)
                case act.Unpark(engine_request_id=engine_id):
                    assert self.computed[engine_id] == 0, "it was parked"
                    self.engine[engine_id] = self.requests[engine_id]
                case act.ReleaseRequest(engine_request_id=engine_id):
                    self.engine.pop(engine_id, None)
                    self.in_place.pop(engine_id, None)
                    if handoff := self.borrowing.pop(engine_id, None):
                        self.run_borrower(self.borrower.release(handoff), now_s)

    def compute(self, engine_id: str, tokens: int, now_s: float) -> None:
        total = len(self.engine[engine_id].token_ids)
        self.computed[engine_id] = min(total, self.computed[engine_id] + tokens)
        self.run(self.side.on_computed(engine_id, self.computed[engine_id]), now_s)
        if self.computed[engine_id] < total:
            return
        request = self.engine.pop(engine_id)
        token_id = EOS if len(request.token_ids) % 5 == 0 else 9  # every fifth length samples EOS
        finish, stop_token_id = find_stop(token_id, 1, request.sampling, stop_ids(request.sampling, (EOS,))) or (None, None)
        output = Output(request_id=engine_id, token_ids=(token_id,), finish=finish, stop_token_id=stop_token_id)
        self.run(self.side.on_first_token(engine_id, output), now_s)

    def park(self, engine_id: str, now_s: float) -> None:
        """Its pages go to others."""
        self.computed[engine_id] = 0
        self.run(self.side.on_parked(engine_id), now_s)

    def publish(self, outcome: str, now_s: float) -> None:
        export = self.exporting.pop(0)
        begin, end = export.begin, export.end
        if outcome == "fail":
            if export.key in self.held_bytes:
                self.spent[export.handoff] -= self.held_bytes[export.key]  # D never hears of it
                actions = self.side.on_publish_failed(export.handoff, export.key, "device")
                self.run(actions, now_s)
        elif outcome == "ok":
            padded = 1 if end - begin == 1 else self.config.transfer_chunk_tokens
            stays_tokens = padded if self.keeps_on_device else 0
            if export.key in self.on_device:
                self.on_device[export.key] = stays_tokens
            message = ready(export.key, begin, end, self.streams[export.handoff].backend)
            self.run(self.side.on_published(export.handoff, message, now_s, stays_tokens=stays_tokens), now_s)

    # --- the mirror

    def run_borrower(self, actions: Sequence[BorrowerAction], now_s: float) -> None:
        for action in actions:
            match action:
                case act.Reply(handoff=handoff, message=message):
                    self.streams[handoff].up.append(message)
                case act.Fetch():
                    assert action.deadline_s <= now_s + LONGEST_S
                    self.loans.fetches.append(action)
                case act.CancelFetch():
                    pass  # what was fetched may still arrive
                case act.Import(request_id=engine_id, key=key):
                    assert key == self.arriving, "only the piece that just arrived"
                    begin, end = self.loans.ranges[key]
                    assert not set(range(begin, end)) & self.in_place[engine_id], "every position once"
                    self.in_place[engine_id] |= set(range(begin, end))
                case Borrowed(engine_request_id=engine_id, held_tokens=held):
                    del self.borrowing[engine_id]
                    in_place = self.in_place.pop(engine_id)
                    assert set(range(held)) <= in_place, "what it says is in place"
                    assert held < len(self.requests[engine_id].token_ids), "one token is left to compute"
                    self.engine[engine_id] = self.requests[engine_id]
                    self.computed[engine_id] = held

    def borrow(self, admit: act.Admit) -> bool:
        """As the role does, for every second hand-off or all: P has the first token in its cache."""
        end = min(admit.held_tokens, len(admit.request.token_ids) - 1)
        if admit.lending is None or end <= 1 or (admit.handoff.serial % 2 and not self.loans.borrow_always):
            return False
        engine_id = admit.request.request_id
        self.borrowing[engine_id] = admit.handoff
        self.in_place[engine_id] = {0}
        self.borrower.start(admit.handoff, engine_id, admit.lending, (1, end), admit.request.deadline_s)
        return True

    def finish_loan(self, fetch: act.Fetch, outcome: str, now_s: float) -> None:
        """`outcome`: ok, again (arrives, and once more later), lost, or a reason to fail with."""
        if outcome != "again":
            self.loans.fetches.remove(fetch)
        if outcome == "lost":
            return
        key = fetch.ready.key
        if outcome in ("ok", "again") and key in self.loans.lent:
            self.arriving = key
            self.run_borrower(self.borrower.on_arrived(fetch.handoff, key, now_s), now_s)
            self.arriving = None
        else:
            reason = "unknown_key" if key not in self.loans.lent else outcome
            self.run_borrower(self.borrower.on_failed(fetch.handoff, key, reason), now_s)
