"""KV from D to P when something goes wrong: pieces or streams are lost, D is silent, P has no pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import Accepted, ChunkReady, Grant, HandoffId, Open, Quiet, Want
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.kv_borrowing import NO_KV_S
from jdisagg.transfer.base import Piece, PublishFailed
from tests.unit.roles.measured import read
from tests.unit.roles.second_turn import PROMPT, QUESTION, first_turn, moved, provenance_of, serve_second_turn, since
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")


@pytest.mark.parametrize(("num_lost", "num_borrowed"), [(1, 16), (2, 16), (9, 0)])
def test_lost_pieces_are_fetched_once_more_and_then_computed(num_lost: int, num_borrowed: int) -> None:
    """Two pieces: one loss, one of each, and the same one twice."""
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    world.network.lose_lent = num_lost
    assert serve_second_turn(world, prompt) == (len(prompt) - 24, num_borrowed, len(prompt) - 8 - num_borrowed)


def test_what_arrived_before_a_loss_is_not_computed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    before = moved(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while since(world, before)[1] == 0:
        world.tick()
    world.network.lose_lent = 9
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)
    assert since(world, before) == (len(prompt) - 24, 8, len(prompt) - 16)
    assert provenance_of(world, "t2").borrowed_tokens == 8
    said = f"borrowing from {world.wire.name} failed after 8 tokens: fetch of [16, 24): connection; the rest is computed here"
    assert [line for line in caplog.messages if "borrowing" in line] == [f"request t2: {said}"]
    metrics = world.prefill.metrics
    assert (read(metrics, "borrowings_total", outcome="failed"), read(metrics, "borrowed_tokens_total")) == (1, 8)


def test_where_p_cannot_pin_what_it_has_all_is_computed() -> None:
    """One that waits needs so many pages that nothing may be pinned before it."""
    world = World(local_prefill=False, want_min_tokens=4, prefill_pages=13)
    asked = {"t2": first_turn(world), "runs": tuple(range(20, 60)), "waits": tuple(range(2, 45))}
    before = moved(world)
    for name in ("runs", "waits", "t2"):
        world.submit(request(name, asked[name], 4, ignore_eos=True))
        for _ in range(2):
            world.tick()
    assert world.prefill.scheduler.counts()["waiting"] == 2, "the second turn as well: it waits for its turn, not for KV"
    world.settle()
    assert {name: world.tokens(name) for name in asked} == {
        name: expected(prompt, 4, ignore_eos=True) for name, prompt in asked.items()
    }
    assert since(world, before)[1] == 0


def test_the_end_of_a_handoff_calls_off_what_is_being_fetched_for_it() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while not world.borrower.snapshot():
        world.tick()
    ((at_d, at_p),) = world.wire.open_streams.items()
    world.network.called_off.clear()
    world.cancel("t2")
    world.settle()
    assert set(world.network.called_off) == {at_d, at_p}


@pytest.mark.parametrize("num_failed", [1, 9])
def test_what_d_cannot_publish_is_computed_and_told(num_failed: int, caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    publish, left = world.lent.publish, [num_failed]

    def fail(handoff: HandoffId, key: str, piece: Piece) -> None:
        if not left[0]:
            publish(handoff, key, piece)
            return
        left[0] -= 1
        failed = PublishFailed(handoff=handoff, key=key, begin=piece.begin, end=piece.end, reason="no memory", backend="fake")
        world.decode.inbox.post(failed)

    world.lent.publish = fail  # type: ignore[method-assign]
    down, up, computed = serve_second_turn(world, prompt)
    assert (down, computed) == (len(prompt) - 24, len(prompt) - 8 - up)
    assert up < 16
    failures = read(world.decode.metrics, "transfer_failures_total", backend="fake", reason="publish")
    assert failures == num_failed - left[0] > 0
    assert [line for line in caplog.messages if "lent" in line] == ["request t2: publishing lent KV failed: no memory"] * int(
        failures
    )


def test_a_silent_receiver_costs_p_a_second_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    publish = world.lent.publish
    world.lent.publish = lambda *_: None  # type: ignore[method-assign,misc]  # never published, never failed
    down, up, computed = serve_second_turn(world, prompt)
    world.lent.publish = publish  # type: ignore[method-assign]
    assert (down, up, computed) == (len(prompt) - 24, 0, len(prompt) - 8)
    assert world.prefill.metrics.transfer.borrowings.labels(outcome="stalled")._value.get() == 1
    (said,) = [line for line in caplog.messages if "borrowing" in line]
    assert said.endswith("nothing is fetched from there for 30 s"), "it is reached, or was not tried"


def test_from_a_receiver_of_which_nothing_comes_nothing_is_fetched_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """P need not reach a D that reaches P: each prompt would wait for a second."""
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)

    def serve(name: str) -> float:
        world.prefill.scheduler.reset_prefix_cache()
        before = moved(world)
        world.submit(request(name, prompt, 4, ignore_eos=True))
        world.settle()
        assert world.tokens(name) == expected(prompt, 4, ignore_eos=True)
        return since(world, before)[1]

    def said() -> list[str]:
        return [line for line in caplog.messages if "borrowing" in line]

    assert (held := serve("reached")) > 0
    world.network.lose_lent = 9
    for name in ("lost", "spared"):
        assert serve(name) == 0
    then = "the rest is computed here; nothing is fetched from there for 30 s: look at its --advertise-host"
    (line,) = said()
    assert line.startswith(f"request lost: borrowing from {world.wire.name} failed after 0 tokens: ")
    assert then in line
    world.network.lose_lent = 0
    world.now_s += NO_KV_S
    before, others = moved(world), (*prompt[:-2], 9, 9)
    world.prefill.scheduler.reset_prefix_cache()
    for name, asked in (("tries", prompt), ("waits not for it", others)):
        world.submit(request(name, asked, 4, ignore_eos=True))
    world.settle()
    assert since(world, before)[1] == held, "of one alone, for both"
    assert serve("reached again") > 0
    assert len(said()) == 1


def test_a_receiver_of_which_some_came_is_asked_again() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while not read(world.prefill.metrics, "transfer_bytes_total", backend="fake"):
        world.tick()
    world.network.lose_lent = 9
    world.settle()
    assert read(world.prefill.metrics, "borrowings_total", outcome="failed") == 1
    world.network.lose_lent = 0
    world.prefill.scheduler.reset_prefix_cache()
    world.submit(request("t3", prompt, 4, ignore_eos=True))
    world.settle()
    assert read(world.prefill.metrics, "borrowings_total", outcome="complete") == 1


@pytest.mark.covers("I-3", "X17")
@pytest.mark.parametrize("num_ticks", range(1, 14))
@pytest.mark.parametrize("what", ["cut", "cancel", "expire"])
def test_the_end_of_a_borrowing_handoff_frees_both_sides(num_ticks: int, what: str) -> None:
    world = World(local_prefill=True, want_min_tokens=4)
    prompt = first_turn(world)
    deadline_s = world.now_s + 0.02 * num_ticks if what == "expire" else 1e9
    world.submit(request("t2", prompt, 4, ignore_eos=True, deadline_s=deadline_s))
    for _ in range(num_ticks):
        world.tick()
    if what == "cancel":
        world.cancel("t2")
    for handoff in list(world.wire.open_streams) if what == "cut" else []:
        world.wire.cut(handoff, "dead")
    world.settle()
    got = world.tokens("t2")
    assert got == expected(prompt, 4, ignore_eos=True)[: len(got)]
    assert len(got) == 4 or what != "cut"


def test_a_full_pool_at_p_is_waited_for_and_nobody_waits_for_ever() -> None:
    world = World(local_prefill=False, want_min_tokens=4, prefill_pages=10, decode_pages=30)
    prompt = first_turn(world)
    for name in ("a", "b"):
        world.submit(request(name, tuple(range(20, 44)), 4, ignore_eos=True))
    serve_second_turn(world, prompt)
    assert world.tokens("a") == world.tokens("b") == expected(tuple(range(20, 44)), 4, ignore_eos=True)


def test_two_that_lend_give_way_to_one_that_needs_the_pages_of_both() -> None:
    """Their peer borrows and has not begun; the first to give way leaves room in the buffer for what the other lends."""
    world = World(local_prefill=False, decode_pages=18, prefill_pages=60, want_min_tokens=4, scheduling_policy="priority")
    asked = {}
    for number, prompt in enumerate((PROMPT, PROMPT[::-1])):
        world.submit(request(f"t{number}", prompt, 14))
        world.settle()
        asked[f"late{number}"] = (*prompt, *world.tokens(f"t{number}"), *QUESTION)
    world.prefill.scheduler.reset_prefix_cache()
    asked["long"] = tuple(range(1, 45))
    for priority, name in ((1, "late0"), (0, "late1"), (2, "long")):
        world.submit(request(name, asked[name], 4, priority=priority))
        for _ in range(4):  # the transfer stands still
            world.prefill.tick(world.now_s)
            world.decode.tick(world.now_s)
    assert world.decode.scheduler.counts()["transfer"] == 1, "the long one has its pages"
    world.settle()
    assert {name: world.tokens(name) for name in asked} == {name: expected(prompt, 4) for name, prompt in asked.items()}


@pytest.mark.covers("C03")
@pytest.mark.parametrize("num_ticks", range(2, 8))
def test_a_lost_stream_goes_on_from_what_is_in_place_and_the_next_peer_borrows_that(num_ticks: int) -> None:
    """Cut in the middle of the transfer, and the next P knows nothing: what is in place at D is neither sent nor computed."""
    world = World(local_prefill=False, want_min_tokens=4)
    held: list[int] = []
    open_stream = world.wire.open

    def record(peer: str, handoff: HandoffId, message: Open) -> None:
        held.append(message.held_tokens)
        open_stream(peer, handoff, message)

    world.wire.open = record  # type: ignore[method-assign]
    prompt = tuple(range(1, 40))
    world.submit(request("a", prompt, 4, ignore_eos=True))
    for _ in range(num_ticks):
        world.tick()
    for handoff in list(world.wire.open_streams):
        world.wire.cut(handoff, "dead")
    world.prefill.tick(world.now_s)
    world.prefill.scheduler.reset_prefix_cache()
    before = moved(world)
    world.settle()
    assert world.tokens("a") == expected(prompt, 4, ignore_eos=True)
    assert len(held) == 2
    provenance, borrowed = provenance_of(world, "a"), held[1] // 4 * 4
    assert provenance.transferred_tokens == len(prompt), "nothing came twice"
    assert provenance.borrowed_tokens == borrowed
    assert since(world, before)[1:] == (borrowed, len(prompt) - borrowed)


def test_a_piece_that_d_lends_before_p_has_pages_for_it_costs_p_no_more_than_the_borrowing() -> None:
    world = World(local_prefill=False, want_min_tokens=4, prefill_pages=12)
    prompt = first_turn(world)
    world.submit(request("hog", tuple(range(20, 48)), 4, ignore_eos=True))
    while not world.prefill.scheduler.counts()["running"]:
        world.tick()
    world.submit(request("t2", prompt, 4, ignore_eos=True))
    while not world.borrower.snapshot():
        world.tick()
    (stream,) = [handoff for handoff in world.wire.open_streams if handoff.request_id == "t2"]
    cells = cast(Any, [SimpleNamespace(position=position) for position in range(8, 16)])
    world.network.pieces["early"] = Piece(begin=8, end=16, data=cells)
    early = ChunkReady(key="early", begin=8, end=16, shape=(1, 8, 1, 1), dtype="float32", num_bytes=32, checksum=1)
    world.wire.send(stream, early)
    world.settle()
    assert world.tokens("t2") == expected(prompt, 4, ignore_eos=True)


def test_a_request_that_lends_over_two_streams_ends_like_any_other() -> None:
    """Its first P has credit left when it falls quiet; the end of the second one's stream makes room in the buffer."""
    world = World(local_prefill=False, want_min_tokens=4, decode_pages=60, prefill_pages=60)
    prompt = first_turn(world, 28)
    peers, world.wire._prefill = world.wire._prefill, Inbox()  # what they say is said below
    for name in ("other", "x"):
        world.submit(request(name, prompt, 4, ignore_eos=True))
    world.decode.tick(world.now_s)

    def borrow(stream: HandoffId) -> None:
        for message in (Accepted(cached_tokens=0), Want(begin=0, end=32, reason="held"), Grant(credit_bytes=96)):
            world.decode.inbox.post(FromPrefill(stream, message))
        world.decode.tick(world.now_s)

    other, first = world.wire.open_streams
    borrow(other)  # takes the whole buffer
    borrow(first)
    world.decode.inbox.post(FromPrefill(first, Quiet(0.7)))
    world.decode.tick(world.now_s)
    (second,) = set(world.wire.open_streams) - {other, first}
    borrow(second)
    world.cancel("other")
    for _ in range(2):
        world.decode.tick(world.now_s)
    assert {name: loan["pieces"] for name, loan in world.lender.snapshot().items()} == {
        f"x#{first.serial}": 2, f"x#{second.serial}": 1
    }  # fmt: skip
    world.cancel("x")
    world.wire._prefill = peers
    world.settle()
