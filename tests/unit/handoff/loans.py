"""What D lends in the world of the hand-off tests: pieces of KV that a prefill worker may fetch from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jdisagg.core.config import TransferConfig
from jdisagg.handoff import actions as act
from jdisagg.handoff.lender import Lender, LenderAction
from jdisagg.handoff.messages import HandoffId
from tests.unit.handoff.parties import Client, Stream
from tests.unit.handoff.rig import BPT, ready


class Loans:
    """D's lender, what it has exported, and fetches of that which are under way."""

    def __init__(
        self,
        config: TransferConfig,
        keys: Iterator[int],
        streams: Mapping[HandoffId, Stream],
        clients: Mapping[str, Client],
    ) -> None:
        self.config, self.streams, self.clients = config, streams, clients
        self.lender = Lender(config, bytes_per_token=BPT, new_key=lambda: f"d-{next(keys)}")
        self.lent: dict[str, act.Export] = {}  # exported by D and not discarded
        self.lending: list[act.Export] = []  # on their way to being published
        self.fetches: list[act.Fetch] = []  # of P
        self.borrow_always = False

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        return {key: (export.begin, export.end) for key, export in self.lent.items()}

    def run(self, actions: Sequence[LenderAction]) -> None:
        for action in actions:
            match action:
                case act.Export(handoff=handoff, begin=begin, end=end, key=key):
                    assert self.streams[handoff].open_at_decode, "nothing is lent once the stream is over"
                    assert not self.clients[handoff.request_id].ends, "its pages are gone"
                    assert set(range(begin, end)) <= self.clients[handoff.request_id].in_place, "only what D holds"
                    assert 0 < end - begin <= self.config.transfer_chunk_tokens
                    self.lent[key] = action
                    self.lending.append(action)
                    lent_bytes = self.lender._exports.buffered_bytes
                    assert lent_bytes <= self.config.transfer_buffer_bytes or len(self.lent) == 1, "bounded buffer"
                case act.Discard(key=key):
                    self.lent.pop(key, None)
                case act.Send(handoff=handoff, message=message):
                    stream = self.streams[handoff]
                    if stream.open_at_decode:
                        stream.down.append(message)
                case _:
                    raise AssertionError(action)

    def publish(self, outcome: str, now_s: float) -> None:
        export = self.lending.pop(0)
        if outcome == "fail" and export.key in self.lent:
            self.run(self.lender.on_publish_failed(export.handoff, export.key, "device"))
        elif outcome == "ok":
            message = ready(export.key, export.begin, export.end)
            self.run(self.lender.on_published(export.handoff, message, now_s))
