"""What processes still hold for somebody, by their own word."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos_kit import leaks
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.leaks import Baseline, Held
from chaos_kit.member import Member


class Idle(Member):
    """Nothing is counted here. Asked for its state it says in turn what it was given, the last for ever."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.name = "D1"
        self._states = list(states)

    async def metrics(self) -> dict[str, float]:
        return {}

    async def state(self) -> dict[str, Any]:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]


def test_an_engine_that_has_not_answered_is_asked_again_and_not_taken_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"error": "the engine thread has not answered", "in_flight": "nothing"}
    assert asyncio.run(leaks.at_rest([Idle(silent, {"streams": []})])) == []
    monkeypatch.setattr(leaks, "SETTLE_S", 0.2)
    (found,) = asyncio.run(leaks.at_rest([Idle(silent)]))
    assert "has not answered" in found
    (found,) = asyncio.run(leaks.at_rest([Idle(silent, {"streams": ["r/0"]})]))
    assert found.startswith("D1: streams")


def test_a_process_that_has_died_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.0)

    async def body() -> None:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(FleetPlan(model=""), tmp_path, http)
            fleet.decode = [Member("D1", directory=tmp_path, http=http, enter=(sys.executable, "-c", ""))]
            fleet.launch(fleet.decode[0])
            await fleet.decode[0].reap()
            nothing = Held(threads=0, descriptors=0, sockets=0, rss_bytes=0)
            assert await Baseline({"D": nothing}, leaks.shared_memory()).exceeded(fleet) == ["D1-1: has died"]

    asyncio.run(body())
