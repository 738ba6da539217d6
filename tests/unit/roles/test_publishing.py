"""What a prefill worker does about pieces: over which backend they go when one fails, and for how long they are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from jdisagg.core.config import TransferConfig
from jdisagg.handoff.events import FromPrefill, PeerAlive, PeerOpened
from jdisagg.handoff.messages import Agreed, HandoffId, Open
from jdisagg.handoff.prefill_side import MAX_PUBLISH_FAILURES
from jdisagg.roles.in_process import InProcessPeers
from jdisagg.roles.inbox import Inbox
from jdisagg.transfer.base import Piece, PublishFailed
from tests.unit.roles.measured import read
from tests.unit.roles.world import PROMPT, World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep", "no_listening")
PIECES = [(0, 8), (8, 16), (16, 19)]


def two_backends(**sizes: int) -> World:
    """Both sides can use them; "fast" is the better one."""
    world = World(local_prefill=False, backends=("fast", "slow"), **sizes)
    open_stream = world.wire.open

    def agree(peer: str, handoff: HandoffId, message: Open) -> None:
        open_stream(peer, handoff, replace(message, backend="fast", backends=("fast", "slow")))
        world.decode.inbox.post(FromPrefill(handoff, Agreed(backends=("fast", "slow"))))

    world.wire.open = agree  # type: ignore[method-assign]
    return world


def serve(world: World) -> None:
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.num_opened == 1


def recoveries(world: World) -> float:
    return read(world.prefill.metrics, "recoveries_total", rung="other_backend")


def test_a_handoff_whose_piece_cannot_be_published_goes_on_over_the_next_backend(caplog: pytest.LogCaptureFixture) -> None:
    world = two_backends()
    fast, slow = world.publishers
    fast.trouble = ["no route"]
    serve(world)
    assert fast.published[0] == PIECES[0]
    assert sorted({*slow.published, *fast.published[1:]}) == PIECES
    assert PIECES[0] in slow.published
    assert PIECES[2] in slow.published, "it stays there"
    assert read(world.prefill.metrics, "transfer_failures_total", backend="fast", reason="publish") == 1
    assert recoveries(world) == 1
    said = "request a: recovering by other_backend; stage publishing [0, 8) over fast: no route; going on over slow"
    assert said in caplog.messages


def test_pieces_that_were_under_way_as_their_backend_failed_do_not_lose_the_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    world, failed = two_backends(buffer_bytes=1000), list[PublishFailed]()
    fast, slow = world.publishers

    def publish(handoff: HandoffId, key: str, piece: Piece) -> None:
        span = {"begin": piece.begin, "end": piece.end}
        failed.append(PublishFailed(handoff=handoff, key=key, **span, reason="no route", backend="fast"))
        if len(failed) == MAX_PUBLISH_FAILURES + 1:
            world.network.transfers.extend(partial(world.prefill.inbox.post, one) for one in failed)

    monkeypatch.setattr(fast, "publish", publish)
    serve(world)
    assert [(one.begin, one.end) for one in failed] == PIECES, "all on their way before the first was heard of"
    assert sorted(slow.published) == PIECES
    assert recoveries(world) == 1


def test_who_cannot_publish_loses_the_handoff_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    world = World(local_prefill=False)
    world.publishers[0].trouble = ["disk full"] * (MAX_PUBLISH_FAILURES + 1)
    world.submit(request("a", PROMPT, 6))
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    provenance = world.outputs["a"][-1].provenance
    assert provenance is not None
    assert provenance.recoveries == ("other_prefill",)
    assert [line for line in caplog.messages if line.endswith(") failed: disk full")]


def test_a_receiver_that_asks_for_another_backend_gets_the_rest_over_that() -> None:
    """Three of its fetches fail, so one piece twice."""
    world = two_backends()
    fast, slow = world.publishers
    world.network.lose_next = 3
    serve(world)
    assert fast.published[0] == PIECES[0]
    assert PIECES[0] in slow.published
    assert PIECES[2] in slow.published, "what follows as well"
    assert recoveries(world) == 0, "that is for the receiver to count"


def test_a_piece_says_who_fetches_it_and_into_how_many_parts_its_heads_go() -> None:
    """Of receivers, one that stands still must not hold up the others; of parts, each device fetches its own."""
    world, pieces = World(local_prefill=False), list[Piece]()
    open_stream, publish = world.wire.open, world.publishers[0].publish

    def note(handoff: HandoffId, key: str, piece: Piece) -> None:
        pieces.append(piece)
        publish(handoff, key, piece)

    world.publishers[0].publish = note  # type: ignore[method-assign]
    world.wire.open = lambda peer, handoff, message: open_stream(peer, handoff, replace(message, head_shards=2))  # type: ignore[method-assign]
    serve(world)
    assert {(piece.receiver, piece.head_shards) for piece in pieces} == {("d0", 2)}


@pytest.mark.parametrize("is_alive", [True, False])
def test_pieces_are_kept_for_a_receiver_that_takes_none_while_it_says_that_it_lives(is_alive: bool) -> None:
    world = World(local_prefill=False)
    world.submit(request("a", PROMPT, 6))
    while not world.publishers[0].published:
        world.tick()
    (stream,) = world.wire.open_streams.values()
    pause_s = 2 * TransferConfig().lease_s
    for _ in range(int(pause_s)):
        world.now_s += 1.0
        world.network.step()
        if is_alive:
            world.prefill.inbox.post(PeerAlive(stream))
        world.prefill.tick(world.now_s)
    assert (world.publishers[0].num_buffered_bytes > 0) == is_alive
    world.settle()
    assert world.tokens("a") == expected(PROMPT, 6)
    assert world.wire.num_opened == (1 if is_alive else 2)


@pytest.mark.parametrize("stays", [False, True])
def test_pieces_of_short_prompts_that_stay_on_the_device_are_few(stays: bool) -> None:
    """Room for three chunks: their tokens would fill it with eight, and each takes as much of the device as a chunk."""
    world, prompts = (
        World(local_prefill=False, decode_pages=60, prefill_pages=60),
        [tuple(range(n, n + 3)) for n in range(3, 11)],
    )
    world.publishers[0].stays = stays
    for prompt in prompts:
        world.submit(request(f"r{prompt[0]}", prompt, 2, ignore_eos=True))
    world.settle()
    assert [world.tokens(f"r{prompt[0]}") for prompt in prompts] == [expected(p, 2, ignore_eos=True) for p in prompts]
    assert (world.publishers[0].most_held <= 3) == stays


def test_of_a_process_that_is_both_sides_no_room_is_kept_for_other_receivers() -> None:
    """There are none. Each piece stays on its device, and half of the room would be half as many prompts at a time."""
    inboxes = Inbox(), Inbox()
    message = Open(request=request("a", PROMPT, 2), held_tokens=0, backend="device_put")
    InProcessPeers(*inboxes).open(InProcessPeers.ADDRESS, HandoffId("a", 1), message)
    (opened,) = inboxes[0].drain(0.0)
    assert isinstance(opened, PeerOpened)
    assert opened.peer == ""
