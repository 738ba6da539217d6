"""What transfers that nobody wants any more leave behind in both processes: nothing."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.transfer_pair import CHUNK, TransferPair, wait_no_more

MIB = 2**20


@pytest.fixture(scope="module", params=("grpc", "tcp", "shm", "jax"))
def pair(request: pytest.FixtureRequest) -> Iterator[TransferPair]:
    made = TransferPair(request.param)
    yield made
    made.close()


@pytest.mark.covers("C10")
@pytest.mark.timeout(400)
def test_two_thousand_abandoned_pieces_leave_nothing(pair: TransferPair) -> None:
    chunk_bytes = 2 * CHUNK * 8 * 256 * 4
    assert chunk_bytes == MIB
    pair.start(features=256)

    def abandon(count: int, first: int) -> None:
        assert pair.producer.ask("churn", count=count, tokens=CHUNK, first=first, answer_s=90)["buffered"] == 0
        for index in range(first, first + count // 10):
            ready = pair.published(f"c{index}", 1)
            pair.consumer.ask("fetch", ready=ready, peer=pair.peer)
            if index % 2:
                pair.consumer.ask("cancel")
            pair.producer.ask("discard", keys=[f"c{index}"])
            pair.consumer.ask("drain")
        assert pair.consumer.ask("settle")["jobs"] == 0

    def look() -> list[dict[str, Any]]:
        return [peer.ask("look") for peer in (pair.producer, pair.consumer)]

    abandon(400, 0)
    before = after = look()
    least = [chunk_bytes] * 2
    for round_ in range(4):  # a pool of the runtime grows now and then, by about a chunk; a leak grows every time
        before = after
        abandon(1000, 4000 * round_ + 1000)
        abandon(1000, 4000 * round_ + 3000)
        after = look()
        growth = [b["rss"] - a["rss"] for a, b in zip(before, after, strict=True)]
        print(f"\n{pair.backend}: RSS growth after 2,200 abandoned pieces of 1 MiB: {[round(g / 1024) for g in growth]} KiB")
        least = [min(both) for both in zip(least, growth, strict=True)]
        if max(least) < chunk_bytes:
            break
    assert max(least) < chunk_bytes, "of P, of D"
    for peer, was in zip((pair.producer, pair.consumer), before, strict=True):
        wait_no_more(peer, threads=was["threads"] + 1, descriptors=was["descriptors"] + 2)  # a server's pool grows lazily
        assert peer.ask("look")["shm"] == []
    pair.moves()
    assert pair.producer.ask("discard", keys=[])["buffered"] == 0


@pytest.mark.covers("C10")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pair", ["jax"], indirect=True)  # which has to cut them for it
def test_large_pieces_withdrawn_while_they_travel_leave_nothing(pair: TransferPair) -> None:
    pair.start(features=4096)
    chunk_bytes, moment = 2 * CHUNK * 8 * 4096 * 4, random.Random(1)
    assert chunk_bytes == 16 * MIB

    def withdraw(count: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for _ in range(count):
            ready = pair.published("k", 1)
            pair.consumer.ask("fetch", ready=ready, peer=pair.peer, within_s=20.0)
            time.sleep(moment.uniform(0.0, 0.03))
            event = pair.consumer.ask("event", timeout_s=0.0)
            outcomes["on its way"] += "nothing" in event
            pair.producer.ask("discard", keys=["k"])
            event = pair.consumer.ask("event", timeout_s=30.0) if "nothing" in event else event
            outcomes[event.get("failed", "arrived")] += 1
        return outcomes

    withdraw(40)
    before, growth, outcomes = pair.consumer.ask("look"), chunk_bytes, Counter[str]()
    for _ in range(2):  # a pool of the runtime may grow once
        was = pair.consumer.ask("look")
        outcomes += withdraw(300)
        growth = pair.consumer.ask("look")["rss"] - was["rss"]
        print(f"\n{pair.backend}: RSS of D grew by {growth // 1024} KiB with 300 pieces of 16 MiB: {dict(outcomes)}")
        if growth < 4 * MIB:
            break
    assert growth < 4 * MIB
    assert outcomes["timeout"] == 0, "a pull that never ends"
    assert outcomes["on its way"] > 0
    wait_no_more(pair.consumer, threads=before["threads"] + 1, descriptors=before["descriptors"] + 2)
    pair.moves()
