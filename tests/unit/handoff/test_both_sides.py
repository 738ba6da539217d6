"""Both sides against each other under random loss, death, delay and late events: nothing is lost, nothing stays."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jdisagg.core.config import LocalPrefill, TransferConfig
from jdisagg.core.errors import DeadlineExceeded
from jdisagg.handoff.live_inbound import due_s
from tests.unit.handoff.parties import Stream
from tests.unit.handoff.rig import BPT, parkable, request, stages
from tests.unit.handoff.world import PEERS, World

DEADLINE_S = 60.0
PLENTY_S = 40.0  # every rung can be taken in
PEER_LISTS = [(), ("p0",), ("p0", "p1"), ("p1", "p0")]


def config(*, local: bool = True, buffer_bytes: int = 80) -> TransferConfig:
    policy = LocalPrefill.ON_FAILURE if local else LocalPrefill.NEVER
    return TransferConfig(transfer_chunk_tokens=4, transfer_buffer_bytes=buffer_bytes, lease_s=5.0, local_prefill=policy)


def assert_all_are_looked_at_in_time(world: World) -> None:
    """Whoever is not looked at in every tick is when something is due."""
    records = world.decode._live
    for record in records.all():
        name = record.request.request_id
        assert (name in records._with_pages) is record.reserved
        assert record.reserved or records._alarms._due_s[name] <= due_s(record)
    assert records._alarms._due_s.keys() | records._with_pages.keys() == set(records._all)
    for worker in world.prefillers.values():
        outbound = worker.side._live
        assert outbound._deadlines._due_s == {one.handoff: one.request.deadline_s for one in outbound.all()}
        for one in outbound.all():
            assert one.handoff in outbound._begun or not (one.pieces or one.credit_bytes or one.is_parkable)
        assert outbound._begun.keys() <= outbound._all.keys()


class HandoffMachine(RuleBasedStateMachine):
    """Rules are what the outside may do; `settle` in teardown is what it must do in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.had_silent_loss = False  # of which nobody was told: what waits for it may do so until its deadline

    @initialize(local=st.booleans(), buffer_bytes=st.sampled_from([30, 40, 80, 1000]))
    def begin(self, local: bool, buffer_bytes: int) -> None:
        self.world = World(config(local=local, buffer_bytes=buffer_bytes))

    @rule(
        tokens=st.integers(1, 13), held=st.integers(0, 13), max_tokens=st.sampled_from([1, 2, 9]),
        peers=st.sampled_from(PEER_LISTS), reserve=st.booleans(),
    )  # fmt: skip
    def start(self, tokens: int, held: int, max_tokens: int, peers: tuple[str, ...], reserve: bool) -> None:
        request_id = f"r{len(self.world.clients)}"
        deadline_s = self.world.now_s + DEADLINE_S
        self.world.start(request(tokens, max_tokens, deadline_s, request_id), min(held, tokens), peers)
        if reserve and not self.world.clients[request_id].ends:
            self.world.reserve(request_id)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        waiting = [name for name, client in self.world.clients.items() if not client.ends and not client.reserved]
        if waiting:
            self.world.reserve(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.world.clients:
            self.world.release(data.draw(st.sampled_from(list(self.world.clients))))

    def _stream(self, data: st.DataObject, *, up: bool) -> Stream | None:
        busy = [s for s in self.world.streams.values() if (s.up and not s.hushed if up else s.down)]
        return data.draw(st.sampled_from(busy)) if busy else None

    @rule(data=st.data(), lose=st.integers(0, 7))
    def read_down(self, data: st.DataObject, lose: int) -> None:
        if stream := self._stream(data, up=False):
            if lose == 0 and len(stream.down) > 1:
                stream.down.popleft()
                self.had_silent_loss = True
            self.world.deliver_down(stream)

    @rule(data=st.data(), lose=st.integers(0, 7))
    def read_up(self, data: st.DataObject, lose: int) -> None:
        if stream := self._stream(data, up=True):
            if lose == 0 and len(stream.up) > 1:
                stream.up.popleft()
                self.had_silent_loss = True
            self.world.deliver_up(stream)

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        if self.world.streams:
            self.world.kill(data.draw(st.sampled_from(list(self.world.streams.values()))))

    @rule(data=st.data())
    def hush_or_wake(self, data: st.DataObject) -> None:
        if streams := [s for s in self.world.streams.values() if s.open_at_decode]:
            stream = data.draw(st.sampled_from(streams))
            if stream.hushed:
                self.world.wake(stream)
            else:
                self.world.hush(stream)

    @rule(peer=st.sampled_from(PEERS))
    def restart(self, peer: str) -> None:
        self.world.restart(peer)

    @rule(peer=st.sampled_from(PEERS), full=st.booleans())
    def fill(self, peer: str, full: bool) -> None:
        self.world.prefillers[peer].full = full

    @rule(data=st.data(), peer=st.sampled_from(PEERS), tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, peer: str, tokens: int) -> None:
        if running := list(self.world.prefillers[peer].engine):
            self.world.compute(peer, data.draw(st.sampled_from(running)), tokens)

    @rule(data=st.data(), peer=st.sampled_from(PEERS))
    def park(self, data: st.DataObject, peer: str) -> None:
        if found := parkable(self.world.prefillers[peer].side):
            self.world.park(peer, data.draw(st.sampled_from(found)))

    @rule(peer=st.sampled_from(PEERS), outcome=st.sampled_from(["ok", "ok", "ok", "fail", "lost"]))
    def publish(self, peer: str, outcome: str) -> None:
        if self.world.prefillers[peer].exporting:
            self.had_silent_loss |= outcome == "lost"
            self.world.publish(peer, outcome)

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "again", "lost", "checksum", "connection", "unknown_key"]))
    def fetch(self, data: st.DataObject, outcome: str) -> None:
        if self.world.fetches:
            self.world.finish_fetch(data.draw(st.sampled_from(self.world.fetches)), outcome)

    @rule(data=st.data(), peer=st.sampled_from(PEERS))
    def reserve_at_prefill(self, data: st.DataObject, peer: str) -> None:
        if waiting := self.world.prefillers[peer].unreserved:
            self.world.reserve_at_prefill(peer, data.draw(st.sampled_from(waiting)))

    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "fail", "lost"]))
    def publish_lent(self, outcome: str) -> None:
        if self.world.loans.lending:
            self.had_silent_loss |= outcome == "lost"
            self.world.publish_lent(outcome)

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "again", "lost", "checksum", "connection"]))
    def fetch_lent(self, data: st.DataObject, outcome: str) -> None:
        if self.world.loans.fetches:
            fetch = data.draw(st.sampled_from(self.world.loans.fetches))
            self.world.finish_loan(self.world.streams[fetch.handoff].peer, fetch, outcome)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 6.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @invariant()
    def ends_at_most_once(self) -> None:
        if not hasattr(self, "world"):
            return
        live = {name for name, client in self.world.clients.items() if not client.ends}
        assert all(len(client.ends) <= 1 for client in self.world.clients.values())
        assert set(self.world.decode.snapshot()["handoffs"]) == live
        assert len(stages(self.world.decode)) == len(live)
        assert_all_are_looked_at_in_time(self.world)
        for worker in self.world.prefillers.values():
            assert worker.side._exports.buffered_bytes == sum(worker.held_bytes.values())
            assert set(worker.borrower.snapshot()) == set(worker.borrowing)
        lent_bytes = sum((export.end - export.begin) * BPT for export in self.world.loans.lent.values())
        assert self.world.loans.lender._exports.buffered_bytes == lent_bytes

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for worker in world.prefillers.values():
            worker.full = False
        soon_s = world.now_s + PLENTY_S
        patient = [client for client in world.clients.values() if not client.ends and client.request.deadline_s >= soon_s]
        for name, client in world.clients.items():
            if not client.ends and not client.reserved:
                world.reserve(name)
        for _ in range(20):
            world.settle()
            world.tick(4.0)
        assert world.now_s >= DEADLINE_S
        assert [name for name, client in world.clients.items() if len(client.ends) != 1] == []
        late = [client.error for client in patient if isinstance(client.error, DeadlineExceeded)]
        assert self.had_silent_loss or not late, late
        world.settle()
        assert world.decode.is_idle
        assert world.loans.lender.is_idle
        assert not world.loans.lent
        for worker in world.prefillers.values():
            assert worker.side.is_idle
            assert worker.borrower.is_idle
            assert not worker.in_place
            assert not worker.held_bytes
            assert not worker.side.num_live


TestBothSides = pytest.mark.covers("C03", "C10", "C05")(HandoffMachine.TestCase)


@pytest.mark.covers("C02", "C03")
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("held", [0, 2, 4, 12])
@pytest.mark.parametrize("buffer_bytes", [30, 80, 1000])
def test_without_trouble_every_token_arrives_once_and_both_sides_are_empty(tokens: int, held: int, buffer_bytes: int) -> None:
    world = World(config(local=False, buffer_bytes=buffer_bytes))
    for index in range(3):
        world.start(request(tokens, 9, DEADLINE_S, f"r{index}"), min(held, tokens), ("p0",))
        world.reserve(f"r{index}")
    world.settle()
    expected = "finished" if tokens % 5 == 0 else "complete"
    assert [client.ends for client in world.clients.values()] == [[expected]] * 3
    assert world.decode.is_idle
    assert all(worker.side.is_idle and not worker.held_bytes for worker in world.prefillers.values())


@pytest.mark.covers("C09", "C10")
def test_hundreds_of_handoffs_with_failures_leave_no_state() -> None:
    world = World(config())
    for index in range(300):
        world.start(request(1 + index % 13, 9, DEADLINE_S, f"r{index}"), 0, PEERS)
        world.reserve(f"r{index}")
        if index % 10 == 0:
            world.kill(list(world.streams.values())[-1])
        if index % 7 == 0:
            world.settle()
    world.settle()
    world.tick(1.0)
    world.settle()
    assert {end for client in world.clients.values() for end in client.ends} <= {"complete", "finished"}
    assert [len(client.ends) for client in world.clients.values()] == [1] * 300
    assert world.decode.is_idle
    assert all(worker.side.is_idle and not worker.held_bytes for worker in world.prefillers.values())
