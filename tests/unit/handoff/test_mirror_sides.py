"""Lender and Borrower against each other under loss, death and delay; and beside an older peer, and the hand-off itself."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jdisagg.handoff import actions as act
from jdisagg.handoff.messages import Ack, ChunkReady, Declined, Grant, Open, Want
from tests.unit.handoff.rig import LENDING, H, none_of, only, prefill_side, ready, request
from tests.unit.handoff.test_both_sides import DEADLINE_S, HandoffMachine, config
from tests.unit.handoff.world import World


def test_an_older_receiver_which_offers_nothing_is_not_asked() -> None:
    admit = only(act.Admit, prefill_side().open(H, Open(request=request(), held_tokens=4, backend="fake"), 0.0))
    assert (admit.held_tokens, admit.lending) == (4, None)
    message = Open(request=request(), held_tokens=4, backend="fake", lending=LENDING)
    assert only(act.Admit, prefill_side().open(H, message, 0.0)).lending == LENDING


def test_messages_of_the_mirror_change_nothing_in_the_hand_off_itself() -> None:
    side = prefill_side()
    side.open(H, Open(request=request(), held_tokens=4, backend="fake", lending=LENDING), 0.0)
    side.on_admitted(H, 0)
    assert side.on_message(H, ready("d", 0, 4), 1.0) == []
    assert none_of(act.Reply, side.on_message(H, Declined(reason="no"), 1.0))


class MirrorMachine(RuleBasedStateMachine):
    """Streams that borrow: loss, repetition, death and delay of what concerns the mirror; the rest happens by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.had_silent_loss = False  # as that of HandoffMachine

    @initialize(buffer_bytes=st.sampled_from([30, 40, 80, 1000]), count=st.integers(1, 3), hedged=st.booleans())
    def begin(self, buffer_bytes: int, count: int, hedged: bool) -> None:
        """`hedged`: each of the first requests borrows over two streams."""
        self.world = World(config(buffer_bytes=buffer_bytes))
        self.world.loans.borrow_always = True
        for _ in range(count):
            self.start(tokens=13, held=12)
        if hedged:
            self.hedge(4, 4)

    def hedge(self, before: int, after: int) -> None:
        """All P are quiet once so many messages of each stream have come; others are asked, and say as much."""
        self.deliver(before)
        for stream in list(self.world.streams.values()):
            self.world.hush(stream)
        self.deliver(after)

    @rule(tokens=st.integers(3, 13), held=st.integers(2, 13))
    def start(self, tokens: int, held: int) -> None:
        name = f"r{len(self.world.clients)}"
        self.world.start(request(tokens, 9, self.world.now_s + DEADLINE_S, name), min(held, tokens), ("p0", "p1"))
        self.world.reserve(name)

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        """Messages, and pages at P."""
        for _ in range(count):
            for stream in list(self.world.streams.values()):
                if stream.down:
                    self.world.deliver_down(stream)
                if stream.up and not stream.hushed:
                    self.world.deliver_up(stream)
            for peer, worker in self.world.prefillers.items():
                for engine_id in worker.unreserved:
                    self.world.reserve_at_prefill(peer, engine_id)

    @rule(data=st.data(), up=st.booleans())
    def lose(self, data: st.DataObject, up: bool) -> None:
        """One message of the mirror."""
        for stream in self.world.streams.values():
            messages = stream.up if up else stream.down
            if messages and isinstance(messages[0], ChunkReady | Declined | Want | Grant | Ack) and data.draw(st.booleans()):
                messages.popleft()
                self.had_silent_loss = True
                return

    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "fail", "lost"]))
    def publish(self, outcome: str) -> None:
        if self.world.loans.lending:
            self.had_silent_loss |= outcome == "lost"
            self.world.publish_lent(outcome)

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "again", "lost", "checksum", "connection"]))
    def fetch(self, data: st.DataObject, outcome: str) -> None:
        if self.world.loans.fetches:
            fetch = data.draw(st.sampled_from(self.world.loans.fetches))
            self.world.finish_loan(self.world.streams[fetch.handoff].peer, fetch, outcome)

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(list(self.world.streams.values()))))

    @rule(data=st.data())
    def hush_or_wake(self, data: st.DataObject) -> None:
        """Of one request two streams may lend."""
        if streams := [stream for stream in self.world.streams.values() if stream.open_at_decode]:
            stream = data.draw(st.sampled_from(streams))
            (self.world.wake if stream.hushed else self.world.hush)(stream)

    @rule(peer=st.sampled_from(["p0", "p1"]))
    def restart(self, peer: str) -> None:
        self.world.restart(peer)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """One client, or several at once: their front end is gone."""
        for name in data.draw(st.lists(st.sampled_from(list(self.world.clients)), min_size=1, max_size=3, unique=True)):
            self.world.release(name)

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            HandoffMachine.teardown(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer_bytes", [40, 80, 120])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(3, 5), (4, 4), (5, 4), (6, 6)])
def test_nothing_is_cut_out_of_a_request_that_lends_over_two_streams_and_is_over(
    buffer_bytes: int, count: int, before: int, after: int
) -> None:
    """The first of its streams to close makes room in the buffer for the other one."""
    machine = MirrorMachine()
    machine.begin(buffer_bytes, count, hedged=False)
    machine.hedge(before, after)
    for name in machine.world.clients:
        machine.world.release(name)
    assert not machine.world.loans.lent


TestMirrorMachine = pytest.mark.covers("I-3", "C10")(MirrorMachine.TestCase)
