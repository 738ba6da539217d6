"""A burst of hand-offs leaves D's event loop its turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jdisagg.api.peer.link import PeerLink
from jdisagg.api.turns import PER_TURN
from jdisagg.handoff.messages import HandoffId
from tests.unit.wire.peers import Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet

NUM = 5 * PER_TURN


def test_streams_are_opened_a_few_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[float]()
    prefill = PeerLink.prefill

    def counted(link: PeerLink, timeout_s: float) -> Any:
        begun.append(timeout_s)
        return prefill(link, timeout_s)

    monkeypatch.setattr(PeerLink, "prefill", counted)

    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address, most, seen = await p.start(), 0, 0
        for number in range(NUM):
            d.client.open(address, HandoffId("r", number), opening())
        async with asyncio.timeout(20):
            while len(begun) < NUM:
                await asyncio.sleep(0)
                most, seen = max(most, len(begun) - seen), len(begun)
        assert most == PER_TURN
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
