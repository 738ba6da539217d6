"""When a decode worker asks the prefill workers that routers tell of whether they are there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from jdisagg.api.peer.presence import AGAIN_S, Presence

PEERS = frozenset(f"p:{number}" for number in range(64))
OFFER_S = 0.25  # between two heartbeats of a router


class Network:
    """Prefill workers that answer, but for those that are `down`."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.down, self.heard, self.broken = set[str](), set[str](), set[str]()
        self.now_s = 0.0
        self._good = set[str]()
        self.tasks = list[asyncio.Task[None]]()
        self.presence = Presence(
            ask=self._ask,
            is_good=self._good.__contains__,
            is_heard=self.heard.__contains__,
            start=self._start,
            draw=Random(0).random,
            clock=lambda: self.now_s,
        )

    async def _ask(self, peer: str) -> None:
        self.asked[peer] += 1
        if peer in self.broken:
            raise OSError("a bug")
        (self._good.discard if peer in self.down else self._good.add)(peer)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(coroutine))

    async def offered(self, begin_s: float, end_s: float) -> list[int]:
        """How many are asked at each heartbeat of the time between."""
        counts = list[int]()
        for number in range(int(begin_s / OFFER_S), int(end_s / OFFER_S)):
            before, self.now_s = self.asked.total(), number * OFFER_S
            self.presence.offer(PEERS)
            for _ in range(5):
                await asyncio.sleep(0)
            counts.append(self.asked.total() - before)
        return counts


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr("jdisagg.api.peer.presence.LOOK_S", 1e6)  # routers call
    return Network()


def test_those_that_answered_are_asked_again_every_few_seconds_and_not_all_at_once(network: Network) -> None:
    async def body() -> None:
        first, *others = await network.offered(0.0, 60.0)
        assert first == len(PEERS)
        assert max(others) < len(PEERS) / 3
        assert all(8 <= num_asked <= 16 for num_asked in network.asked.values()), f"about every {AGAIN_S:g} s"

    asyncio.run(body())


def test_one_of_which_a_hand_off_hears_is_not_asked_until_a_while_after_it(network: Network) -> None:
    async def body() -> None:
        await network.offered(0.0, 1.0)
        network.heard.add("p:7")
        await network.offered(1.0, 60.0)
        assert network.asked["p:7"] == 1
        network.heard.clear()
        await network.offered(60.0, 63.0)
        assert network.asked["p:7"] == 1
        await network.offered(63.0, 67.0)
        assert network.asked["p:7"] == 2

    asyncio.run(body())


def test_one_that_went_away_while_nothing_was_asked_of_it_is_found_out_within_seconds_and_asked_until_it_answers(
    network: Network,
) -> None:
    async def body() -> None:
        await network.offered(0.0, 20.0)
        network.down.add("p:7")
        before = network.asked["p:7"]
        await network.offered(20.0, 27.0)
        assert network.asked["p:7"] >= before + 4, "its first silence, and then at every chance"
        network.down.clear()
        await network.offered(27.0, 27.25)
        answered = network.asked["p:7"]
        await network.offered(27.25, 31.0)
        assert network.asked["p:7"] == answered

    asyncio.run(body())


def test_routers_that_fall_silent_change_nothing_of_that(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.LOOK_S", 0.0)

    async def look() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def body() -> None:
        network.presence.offer(PEERS)
        await look()
        assert network.asked.total() == len(PEERS)
        network.now_s = 3.0
        await look()
        assert network.asked.total() == len(PEERS)
        network.down.add("p:7")
        network.now_s = 7.0
        await look()
        assert len([peer for peer in PEERS if network.asked[peer] == 2]) == len(PEERS) - 1
        before = network.asked["p:7"]
        await look()
        assert network.asked["p:7"] > before
        network.presence.offer(frozenset())
        await look()
        before = network.asked["p:7"]
        await look()
        assert network.asked["p:7"] == before
        assert all(task.done() for task in network.tasks)

    asyncio.run(body())


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_question_that_ends_in_a_bug_is_asked_again_and_the_bug_is_in_the_log_once(
    is_watched: bool, network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jdisagg.api.peer.presence.LOOK_S", 0.0)

    async def body() -> None:
        network.broken.add("p")
        if is_watched:
            network.presence.watch("p")
        else:
            network.presence.offer(frozenset(("p",)))
        while network.asked["p"] < 5:
            await asyncio.sleep(0)
        assert [record.getMessage() for record in caplog.records if record.exc_info] == [
            "asking prefill peer p whether it is there failed"
        ]
        network.broken.clear()
        while network.asked["p"] < 7:
            network.now_s += 10.0
            await asyncio.sleep(0)
        network.broken.add("p")
        while network.asked["p"] < 10:
            network.now_s += 10.0
            await asyncio.sleep(0)
        assert len(caplog.records) == 2, "it is news again"

    asyncio.run(asyncio.wait_for(body(), 20.0))
