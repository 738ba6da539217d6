"""What a publisher does around a backend's `put`: order, room, failures, discards that come at any moment."""

import logging
import queue
import threading
import weakref

import jax
import pytest

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer import lanes
from jdisagg.transfer.base import Piece, Published, PublishFailed, TransferEvent
from jdisagg.transfer.publisher import LanePublisher
from jdisagg.transfer.target import announce

WAIT_S = 60.0
PIECE_BYTES = 4


class Noted:
    """Offers that write down what they are told; a put may be held up, or raise."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.rested = threading.Event()
        self.raises: dict[str, Exception] = {}

    def put(self, key: str, piece: Piece) -> tuple[ChunkReady, int]:
        self.began.set()
        assert self.may_end.wait(WAIT_S)
        self.told.append(f"put {key}")
        if key in self.raises:
            raise self.raises[key]
        return announce(key, piece, 0), 0

    def discard(self, key: str) -> None:
        self.told.append(f"discard {key}")

    def rest(self) -> None:
        self.rested.set()

    def close(self) -> None:
        self.told.append("close")


class Rig:
    def __init__(self) -> None:
        self.offers = Noted()
        self.posted = queue.SimpleQueue[TransferEvent]()
        self.publisher = LanePublisher("noted", self.offers, self.posted.put, on_idle=self.offers.rest)

    def publish(self, *keys: str) -> None:
        for key in keys:
            piece = Piece(begin=0, end=1, data=jax.numpy.zeros((1, 1, 1, 1)))
            self.publisher.publish(HandoffId(key, 0), key, piece)

    def answer(self) -> TransferEvent:
        return self.posted.get(timeout=WAIT_S)


def test_a_piece_discarded_while_it_is_put_is_not_announced_and_is_freed_after_the_put() -> None:
    rig = Rig()
    rig.offers.may_end.clear()
    rig.publish("a")
    assert rig.offers.began.wait(WAIT_S)
    rig.publisher.discard("a")
    assert rig.publisher.num_buffered_bytes == 0
    rig.publish("b")
    rig.offers.may_end.set()
    assert rig.answer().handoff == HandoffId("b", 0)
    assert rig.offers.told == ["put a", "discard a", "put b"]
    rig.publisher.close()


def test_a_piece_discarded_before_its_turn_is_never_put() -> None:
    rig = Rig()
    rig.offers.may_end.clear()
    rig.publish("a", "b")
    assert rig.offers.began.wait(WAIT_S)
    rig.publisher.discard("b")
    rig.publish("c")
    rig.offers.may_end.set()
    assert [rig.answer().handoff.request_id for _ in range(2)] == ["a", "c"]
    assert "put b" not in rig.offers.told
    rig.publisher.close()


def test_a_piece_discarded_before_its_turn_leaves_the_device_at_once() -> None:
    """Others are cut in its place, while the one before it may be waiting for a step of seconds."""
    rig = Rig()
    rig.offers.may_end.clear()
    rig.publish("a")
    assert rig.offers.began.wait(WAIT_S)
    piece = Piece(begin=0, end=1, data=jax.numpy.zeros((1, 1, 1, 1)))
    data = weakref.ref(piece.data)
    rig.publisher.publish(HandoffId("b", 0), "b", piece)
    del piece
    assert data() is not None
    rig.publisher.discard("b")
    assert data() is None
    rig.offers.may_end.set()
    rig.publisher.close()


@pytest.mark.parametrize(
    ("error", "level", "traceback"),
    [
        (RuntimeError("the device is gone"), logging.WARNING, False),
        (MemoryError("no memory"), logging.WARNING, False),
        (OSError("no space"), logging.WARNING, False),
        (TypeError("a bug"), logging.ERROR, True),
    ],
)
def test_whatever_putting_a_piece_raises_fails_it_alone(
    error: Exception, level: int, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.offers.raises["a"] = error
    rig.publish("a", "b")
    failed, published = rig.answer(), rig.answer()
    assert isinstance(failed, PublishFailed)
    assert (failed.key, failed.begin, failed.end, failed.reason, failed.backend) == ("a", 0, 1, f"device: {error}", "noted")
    assert isinstance(published, Published)
    assert rig.publisher.num_buffered_bytes == PIECE_BYTES
    assert rig.offers.told == ["put a", "discard a", "put b"]
    assert [record.levelno for record in caplog.records] == [level]
    assert ("Traceback" in caplog.text) == traceback
    rig.publisher.close()


def test_an_unknown_key_reaches_nobody() -> None:
    rig = Rig()
    rig.publish("a")
    rig.answer()
    for key in ("x", "a", "a"):
        rig.publisher.discard(key)
    rig.publisher.close()
    assert rig.offers.told == ["put a", "discard a", "close"]


def test_close_frees_what_is_offered_and_puts_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    join = rig.publisher._lane.join

    def put_meanwhile(timeout_s: float) -> None:
        rig.offers.may_end.set()
        join(timeout_s)

    monkeypatch.setattr(rig.publisher._lane, "join", put_meanwhile)
    rig.publish("a")
    rig.answer()
    rig.offers.may_end.clear()
    rig.offers.began.clear()
    rig.publish("b")
    assert rig.offers.began.wait(WAIT_S)
    rig.publisher.close()
    assert rig.offers.told == ["put a", "put b", "discard a", "discard b", "close"]
    assert rig.publisher.num_buffered_bytes == 0
    assert rig.posted.empty()
    assert "noted-publish" not in {thread.name for thread in threading.enumerate()}


def test_offers_that_nobody_asks_for_may_rest_and_serve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    rig = Rig()
    for key in ("a", "b"):
        assert rig.offers.rested.wait(WAIT_S)
        rig.publish(key)
        assert isinstance(rig.answer(), Published)
        rig.offers.rested.clear()
    rig.publisher.close()
    assert rig.offers.told == ["put a", "put b", "discard a", "discard b", "close"]
