"""What every backend promises, between two operating-system processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.transfer_pair import CHUNK, Peer, TransferPair, wait_no_more

BACKENDS = ("grpc", "tcp", "shm", "jax")
MIB = 2**20
LIMIT_S = 15.0  # of what takes three seconds or less


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[TransferPair]:
    made = TransferPair(request.param)
    yield made
    made.close()


@pytest.mark.covers("P09", "C02")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 2), (8, 2)])
def test_bytes_are_equal_whatever_the_meshes(pair: TransferPair, tp_p: int, tp_d: int, dtype: str) -> None:
    pair.start(tp_p=tp_p, tp_d=tp_d, dtype=dtype)
    for seed, tokens in enumerate((CHUNK, 1, 5, 17)):
        got = pair.fetched(pair.published(f"k{seed}", seed, tokens))
        assert got.get("digest") == pair.digest(seed, tokens), got
        assert (got["padding"], got["devices"], got["shard_heads"]) == (0, tp_d, 8 // tp_d)
    assert pair.producer.ask("discard", keys=[f"k{seed}" for seed in range(4)])["buffered"] == 0


@pytest.mark.parametrize(
    ("dtype", "d_dtype", "d_chunk"), [("float32", "bfloat16", 0), ("float32", "", 128), ("bfloat16", "float32", 96)]
)
def test_another_dtype_or_chunk_size_is_converted(pair: TransferPair, dtype: str, d_dtype: str, d_chunk: int) -> None:
    pair.start(tp_p=2, tp_d=2, dtype=dtype, d_dtype=d_dtype, d_chunk=d_chunk)
    got = pair.fetched(pair.published("k", 3, 21))
    assert got.get("digest") == pair.digest(3, 21, d_dtype), got


def test_a_damaged_piece_and_one_in_anothers_place_are_found_out(pair: TransferPair) -> None:
    pair.start(tp_d=2)
    first, second = pair.published("first", 1), pair.published("second", 2)
    assert pair.fetched({**first, "checksum": first["checksum"] ^ 1})["failed"] == "checksum"
    swapped = pair.fetched({**second, "key": first["key"] if pair.backend == "grpc" else "x", "locator": first["locator"]})
    assert swapped["failed"] in ("checksum", "unknown_key"), swapped
    third = pair.published("third", 3)
    fourth = pair.published("fourth", 4)
    swapped = pair.fetched({**third, "key": fourth["key"], "locator": fourth["locator"]})
    assert swapped["failed"] == "checksum", swapped
    if pair.backend == "grpc":
        pair.producer.ask("spoil", key="third")
        assert pair.fetched(third)["failed"] == "checksum"
    pair.moves()


def test_a_piece_shorter_than_announced_fails_alone(pair: TransferPair) -> None:
    pair.start()
    ready = pair.published("k", 1, 3)
    longer = {**ready, "end": 20, "shape": [2, 20, 8, 16], "num_bytes": ready["num_bytes"] // 3 * 20}
    if ready["locator"] and pair.backend == "jax":
        *where, _, kind = ready["locator"].split(" ")
        longer["locator"] = " ".join([*where, "64", kind])
    began_s = time.monotonic()
    got = pair.fetched(longer, within_s=2.0)
    assert got["failed"] in ("truncated", "checksum", "connection", "timeout", "stalled"), got
    assert time.monotonic() - began_s < LIMIT_S
    pair.moves()


def test_a_discarded_piece_is_unknown_at_once(pair: TransferPair) -> None:
    pair.start()
    ready = pair.published("k")
    assert pair.producer.ask("discard", keys=["k"])["buffered"] == 0
    pair.published("other", 5)
    began_s = time.monotonic()
    assert pair.fetched(ready, within_s=2 * LIMIT_S)["failed"] == "unknown_key"
    assert time.monotonic() - began_s < LIMIT_S
    pair.moves()


def test_a_piece_fetched_twice_arrives_again_or_is_unknown_at_once(pair: TransferPair) -> None:
    pair.start()
    ready = pair.published("k", 9)
    assert pair.fetched(ready)["digest"] == pair.digest(9)
    again = pair.fetched(ready)
    assert again.get("digest") == pair.digest(9) or again["failed"] == "unknown_key"
    pair.moves()


def test_a_killed_producer_ends_every_fetch_and_the_next_one_is_used(pair: TransferPair) -> None:
    pair.start(features=256)
    readies = [pair.published(f"k{index}", index) for index in range(12)]
    for ready in readies:
        pair.consumer.ask("fetch", ready=ready, peer=pair.peer, within_s=3.0)
    pair.producer.kill()
    began_s = time.monotonic()
    events = [pair.consumer.ask("event") for _ in readies]
    assert time.monotonic() - began_s < LIMIT_S
    assert all(
        "digest" in event or event["failed"] in ("connection", "unreachable", "unknown_key", "timeout", "stalled")
        for event in events
    ), events
    assert all(event["digest"] == pair.digest(int(event["key"][1:])) for event in events if "digest" in event)
    pair.replace_producer()
    pair.moves()


def test_a_killed_consumer_leaves_the_producer_whole(pair: TransferPair) -> None:
    pair.start(features=256)
    pair.moves()
    before = pair.producer.ask("look")
    for round_ in range(2):
        keys = [f"k{round_}-{index}" for index in range(8)]
        for index, key in enumerate(keys):
            pair.consumer.ask("fetch", ready=pair.published(key, index), peer=pair.peer)
        pair.replace_consumer()
        assert pair.producer.ask("discard", keys=keys)["buffered"] == 0
        pair.moves()
    wait_no_more(pair.producer, descriptors=before["descriptors"] + 2)
    assert pair.producer.ask("look")["shm"] == []


@pytest.mark.covers("X14")
def test_a_frozen_producer_costs_the_deadline_and_no_more(pair: TransferPair) -> None:
    pair.start()
    pair.moves()
    ready = pair.published("k")
    pair.producer.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    got = pair.fetched(ready, within_s=LIMIT_S if pair.backend == "shm" else 1.0)
    took_s = time.monotonic() - began_s
    pair.producer.signal(signal.SIGCONT)
    if pair.backend == "shm":
        assert "digest" in got, "its memory needs nobody to serve it"
    else:
        assert got.get("failed") in ("timeout", "stalled"), got
        assert took_s < LIMIT_S
    pair.moves()


@pytest.mark.parametrize("round_", range(4))  # where in a transfer the blow falls is chance
def test_a_stalled_consumer_does_not_hold_up_a_healthy_one(pair: TransferPair, round_: int) -> None:
    pair.start(features=1024)  # 4 MiB a piece
    stalled = pair.another_consumer()
    pair.producer.ask("offers_last", seconds=60.0)
    try:
        readies = [pair.published(f"s{index}", 0, receiver="stalled") for index in range(4)]
        for ready in readies:
            stalled.ask("fetch", ready=ready, peer=pair.peer, within_s=60.0)
        time.sleep(0.008 * round_)
        stalled.signal(signal.SIGSTOP)
        for index in range(4):
            ready = pair.published(f"h{index}", index, receiver="healthy")
            assert pair.fetched(ready).get("digest") == pair.digest(index), "while the stalled one still stands"
        stalled.signal(signal.SIGCONT)
        assert all("digest" in stalled.ask("event") for _ in range(4))
    finally:
        pair.producer.ask("offers_last")
        stalled.kill()


def test_a_producer_that_stalls_in_a_transfer_does_not_hold_up_another(pair: TransferPair) -> None:
    pair.start(features=8192)  # 32 MiB a piece
    healthy, stalled_peer = Peer(), pair.peer
    try:
        healthy_peer = healthy.ask("produce", **pair.produce)["peer"]
        pair.moves()
        pair.consumer.ask("fetch", ready=pair.published("s", 0), peer=stalled_peer, within_s=3.0)
        time.sleep(0.01)  # it takes several times as long
        pair.producer.signal(signal.SIGSTOP)
        ready = healthy.ask("publish", key="h", seed=5, tokens=CHUNK)["ready"]
        pair.consumer.ask("fetch", ready=ready, peer=healthy_peer, within_s=10.0)
        events = [pair.consumer.ask("event") for _ in range(2)]
        (arrived,) = [event for event in events if event["key"] == "h"]
        assert arrived.get("digest") == pair.digest(5), events
        pair.producer.signal(signal.SIGCONT)
        pair.moves()
    finally:
        healthy.kill()


def test_a_cancelled_fetch_is_silent_and_the_next_one_works(pair: TransferPair) -> None:
    pair.start(features=256)
    for round_ in range(5):
        for index in range(4):
            pair.consumer.ask("fetch", ready=pair.published(f"k{round_}-{index}", index), peer=pair.peer)
        pair.consumer.ask("cancel")
        said = [pair.consumer.ask("event", timeout_s=0.2) for _ in range(5)]  # what was on its way, then nothing
        assert "nothing" in said[-1], said
        pair.producer.ask("discard", keys=[f"k{round_}-{index}" for index in range(4)])
        pair.moves()


def test_closing_with_work_under_way_leaves_no_thread(pair: TransferPair) -> None:
    pair.start(features=256)
    pair.moves()
    idle = {"p": pair.producer.ask("close"), "d": pair.consumer.ask("close")}
    assert idle["p"]["buffered"] == 0
    peers = (pair.producer, pair.consumer)
    quiet = [peer.ask("look") for peer in peers]
    pair.start(features=256)
    for index in range(6):
        pair.consumer.ask("fetch", ready=pair.published(f"k{index}", index), peer=pair.peer, within_s=2.0)
    assert pair.consumer.ask("close")["buffered"] == 0
    assert pair.producer.ask("close")["buffered"] == 0
    for peer, before in zip(peers, quiet, strict=True):
        wait_no_more(peer, threads=before["threads"], descriptors=before["descriptors"] + 1)


def test_nothing_of_a_killed_producer_stays_on_the_machine() -> None:
    pair = TransferPair("shm")
    try:
        pair.start(features=256)
        pair.published("k")
        ready = pair.published("m")
        pair.producer.kill()
        assert pair.fetched(ready, within_s=LIMIT_S)["failed"] == "unknown_key"
        assert pair.consumer.ask("look")["shm"] == []
    finally:
        pair.close()
