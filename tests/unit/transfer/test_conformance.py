"""What every backend promises, run on each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Piece, PieceArrived, PieceFailed, Published, PublishFailed
from tests.unit.auditor import self_check, the_auditor
from tests.unit.transfer.rig import CHUNK_TOKENS, FEATURES, HEADS, LAYERS, H, Rig, error_array, piece, sharding, tokens

KINDS = ["device_put", "grpc", "grpc-loopback", "tcp", "shm", "jax", "fake"]


@pytest.fixture(params=KINDS)
def unstarted(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


@pytest.fixture
def rig(unstarted: Rig) -> Iterator[Rig]:
    unstarted.start()
    yield unstarted
    unstarted.close()


@pytest.mark.covers("P09", "C02")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 5, CHUNK_TOKENS])
def test_a_piece_arrives_byte_exact_with_the_sharding_of_the_pool(unstarted: Rig, dtype: str, num_tokens: int) -> None:
    rig = unstarted.start(dtype=dtype)
    sent = tokens(num_tokens, dtype)
    ready = rig.published("k", piece(sent))
    assert (ready.begin, ready.end, ready.dtype) == (3, 3 + num_tokens, dtype)
    assert ready.shape == (LAYERS, num_tokens, HEADS, FEATURES)
    assert ready.num_bytes == sent.nbytes
    got = rig.arrived(ready).piece
    assert got.data.shape == (LAYERS, CHUNK_TOKENS, HEADS, FEATURES)
    assert got.data.sharding == sharding(4, 4)
    assert np.asarray(got.data)[:, :num_tokens].tobytes() == sent.tobytes()
    assert (got.begin, got.end) == (ready.begin, ready.end)
    rig.publisher.discard("k")
    assert rig.publisher.num_buffered_bytes == 0
    rig.close()


def test_another_dtype_is_converted_on_arrival(unstarted: Rig) -> None:
    rig = unstarted.start(dtype="bfloat16")
    sent = tokens(5, "float32")
    got = rig.arrived(rig.published("k", piece(sent))).piece
    assert str(got.data.dtype) == "bfloat16"
    expected = sent.astype(got.data.dtype)
    assert np.asarray(got.data)[:, :5].tobytes() == expected.tobytes()
    rig.close()


def test_another_chunk_size_is_padded_with_zeros(unstarted: Rig) -> None:
    rig = unstarted.start(chunk_tokens=2 * CHUNK_TOKENS)
    sent = tokens(5)
    got = np.asarray(rig.arrived(rig.published("k", piece(sent))).piece.data)
    assert got.shape[1] == 2 * CHUNK_TOKENS
    assert np.array_equal(got[:, :5], sent)
    assert not got[:, 5:].any()
    rig.close()


def test_many_pieces_keep_their_identity(rig: Rig) -> None:
    sent = {f"k{index}": tokens(CHUNK_TOKENS, seed=index) for index in range(8)}
    readies = [rig.published(key, piece(values), HandoffId(key, 1)) for key, values in sent.items()]
    for ready in reversed(readies):
        rig.fetch(ready, HandoffId(ready.key, 1))
    for _ in readies:
        event = rig.event()
        assert isinstance(event, PieceArrived)
        assert event.handoff == HandoffId(event.ready.key, 1)
        assert np.array_equal(np.asarray(event.piece.data), sent[event.ready.key])


def test_the_source_may_be_discarded_while_it_is_fetched_and_frees_at_once(rig: Rig) -> None:
    ready = rig.published("k", piece(tokens(5)))
    assert rig.publisher.num_buffered_bytes == ready.num_bytes
    rig.fetch(ready)
    rig.publisher.discard("k")
    assert rig.publisher.num_buffered_bytes == 0
    event = rig.event()
    assert isinstance(event, PieceArrived) or (isinstance(event, PieceFailed) and event.reason == "unknown_key")
    rig.publisher.discard("k")


def test_discard_right_after_publish_leaves_nothing(rig: Rig) -> None:
    rig.publisher.publish(H, "k", piece(tokens(5)))
    rig.publisher.discard("k")
    assert rig.publisher.num_buffered_bytes == 0
    rig.publisher.publish(H, "other", piece(tokens(5)))
    while not (isinstance(event := rig.event(), Published) and event.ready.key == "other"):
        pass  # of the first one, from before it was discarded
    other = event.ready
    if not other.locator:
        assert rig.failed(replace(other, key="k")).reason == "unknown_key"
    assert rig.store.get("k") is None


def test_an_unknown_key_answers_quickly(rig: Rig) -> None:
    ready = replace(rig.published("k", piece(tokens(5))), key="no such key")
    if ready.locator:
        pytest.skip("a locator is only ever given for a piece that is there")
    assert failed_early(rig, ready) == "unknown_key"


def failed_early(rig: Rig, ready: ChunkReady) -> str:
    """Why it does, long before its deadline."""
    rig.fetch(ready, within_s=600.0)
    event = rig.event(60.0)
    assert isinstance(event, PieceFailed), event
    return event.reason


def test_a_piece_that_was_discarded_before_the_fetch_is_unknown_at_once(rig: Rig) -> None:
    ready = rig.published("k", piece(tokens(5)))
    rig.publisher.discard("k")
    kept = rig.published("next", piece(tokens(5)))  # whatever freed the room may be using it again
    assert failed_early(rig, ready) == "unknown_key"
    rig.arrived(kept)


def test_a_cancelled_fetch_posts_nothing_or_was_posted_before(rig: Rig) -> None:
    ready = rig.published("k", piece(tokens(5)))
    for _ in range(20):
        rig.fetch(ready)
    rig.fetcher.cancel(H)
    rig.quiet(0.3)
    while not rig.events.empty():
        rig.events.get()
    assert rig.quiet(0.2)
    other = HandoffId("other", 2)
    rig.fetch(ready, other)
    event = rig.event()
    assert event.handoff == other


def test_a_fetch_past_its_deadline_fails_as_timeout(rig: Rig) -> None:
    if rig.kind == "fake":
        pytest.skip("the fake has no clock")
    ready = rig.published("k", piece(tokens(5)))
    rig.fetch(ready, within_s=-1.0)
    event = rig.event()
    assert isinstance(event, PieceFailed)
    assert event.reason == "timeout"


def test_a_piece_that_is_longer_than_its_array_fails_alone(rig: Rig) -> None:
    bad = replace(piece(tokens(CHUNK_TOKENS)), begin=0, end=CHUNK_TOKENS + 1)
    rig.publisher.publish(H, "bad", bad)
    event = rig.event()
    if not isinstance(event, PublishFailed):
        assert isinstance(event, Published)
        rig.failed(event.ready)
    rig.publisher.discard("bad")
    assert rig.publisher.num_buffered_bytes == 0
    sent = tokens(5)
    assert np.array_equal(np.asarray(rig.arrived(rig.published("good", piece(sent))).piece.data)[:, :5], sent)


@pytest.mark.covers("C08", "X05")
def test_an_error_array_fails_its_piece_alone(rig: Rig) -> None:
    bad = Piece(begin=0, end=4, data=error_array())
    rig.publisher.publish(H, "bad", bad)
    event = rig.event()
    if not isinstance(event, PublishFailed):
        failed = rig.failed(event.ready)  # pyright: ignore[reportAttributeAccessIssue]
        assert failed.reason == "device"
    rig.publisher.discard("bad")
    sent = tokens(5)
    assert np.array_equal(np.asarray(rig.arrived(rig.published("good", piece(sent))).piece.data)[:, :5], sent)
    rig.publisher.discard("good")
    assert rig.publisher.num_buffered_bytes == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": (LAYERS, 5, HEADS + 1, FEATURES)}, "heads"),
        ({"shape": (LAYERS + 1, 5, HEADS, FEATURES)}, "layers"),
        ({"dtype": "int4"}, "dtype"),
        ({"end": 3 + CHUNK_TOKENS + 1}, "tokens"),
        ({"num_bytes": 7}, "bytes"),
        ({"group": 1}, "group"),
    ],
)
def test_a_piece_that_does_not_fit_is_named_and_refused(rig: Rig, change: dict[str, object], word: str) -> None:
    ready = replace(rig.published("k", piece(tokens(5))), **change)
    failed = rig.failed(ready)
    assert failed.reason == "device"
    assert word in failed.detail


@pytest.mark.covers("C20", "I-7")
def test_calls_of_the_engine_thread_begin_no_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [piece(tokens(CHUNK_TOKENS)) for _ in range(5)]
    rig.arrived(rig.published("warm", sent[3]))  # what is imported late is imported now
    rig.publisher.discard("warm")
    ready = rig.published("first", sent[4])
    auditor = the_auditor()
    auditor.patch(monkeypatch)
    assert self_check(auditor) == ["Condition.wait", "open", "time.sleep"]
    auditor.seen.clear()
    with auditor.watching():
        for index in range(3):
            rig.publisher.publish(H, f"k{index}", sent[index])
            rig.fetch(ready)
        for index in range(3):
            rig.publisher.discard(f"k{index}")
        rig.fetcher.cancel(H)
    assert not auditor.seen, auditor.seen
    rig.quiet()


def test_calls_of_the_engine_thread_take_no_time(rig: Rig) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ y * 0.01, x))
    ballast = np.ones((512, 512), np.float32)
    slow(ballast).block_until_ready()
    sent = piece(tokens(CHUNK_TOKENS))
    ready = rig.published("warm", sent)
    rig.arrived(ready)

    def share() -> float:
        """Of the time in which the device is busy."""
        began_s, took_s = time.perf_counter(), 0.0
        busy = slow(ballast)
        for index in range(5):
            for call in (
                lambda index=index: rig.publisher.publish(H, f"k{index}", sent),
                lambda: rig.fetch(ready),
                lambda index=index: rig.publisher.discard(f"k{index}"),
                lambda: rig.fetcher.cancel(H),
            ):
                called_s = time.perf_counter()
                call()
                took_s += time.perf_counter() - called_s
        busy.block_until_ready()
        return took_s / (time.perf_counter() - began_s)

    assert any(share() < 0.25 for _ in range(5)), "a machine that does other things does not keep it from running each time"
    rig.quiet()


def test_a_piece_is_announced_when_the_device_has_made_it(rig: Rig) -> None:
    """Whoever hears of it gives the fetch so many seconds, which are not for P's steps: they may take longer."""
    if rig.kind == "fake":
        pytest.skip("the fake has no device")
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ y / 512, x))
    gather = jax.jit(lambda x, y: x * y[0, 0], out_shardings=sharding(0, 2))
    everywhere = jax.sharding.NamedSharding(sharding(0, 2).mesh, jax.sharding.PartitionSpec())
    sent, ballast = piece(tokens(CHUNK_TOKENS)), jax.device_put(np.ones((512, 512), np.float32), everywhere)
    gather(sent.data, slow(ballast)).block_until_ready()
    made = gather(sent.data, slow(ballast))
    rig.publisher.publish(H, "k", replace(sent, data=made))
    while rig.events.empty():
        time.sleep(1e-3)
    assert made.is_ready(), "its clock would run while the device is at work for others"
    event = rig.event()
    assert isinstance(event, Published)
    assert np.array_equal(np.asarray(rig.arrived(event.ready).piece.data), np.asarray(sent.data))


def test_close_ends_threads_and_frees_everything_even_with_work_queued(rig: Rig) -> None:
    ready = rig.published("k", piece(tokens(5)))
    for index in range(10):
        rig.publisher.publish(H, f"k{index}", piece(tokens(5)))
        rig.fetch(ready)
    rig.close()
    assert rig.publisher.num_buffered_bytes == 0


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What this thread starts runs on one core, and the system says that there is no other."""
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.covers("X21")
@pytest.mark.usefixtures("one_core")
def test_one_core_is_enough_for_both_halves(unstarted: Rig) -> None:
    rig = unstarted.start()
    sent = {f"k{index}": tokens(5, seed=index) for index in range(3)}
    readies = [rig.published(key, piece(values)) for key, values in sent.items()]
    for ready in readies:
        assert np.array_equal(np.asarray(rig.arrived(ready).piece.data)[:, :5], sent[ready.key])
    rig.close()


@pytest.mark.covers("X23")
def test_idle_halves_hold_and_post_nothing(rig: Rig) -> None:
    assert rig.quiet(0.0)
    assert rig.publisher.num_buffered_bytes == 0
    with pytest.raises(AssertionError, match="empty"):
        rig.publisher.publish(H, "k", Piece(begin=4, end=4, data=piece(tokens(5)).data))
