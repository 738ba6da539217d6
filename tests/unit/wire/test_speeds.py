"""How fast a prefill worker computes prompts, as decode workers and routers hear of it."""

from __future__ import annotations

from math import inf, nan

import pytest

from jdisagg.api.fleet.codec import decode_load
from jdisagg.core.fleet import Load
from jdisagg.core.speed import Speed
from jdisagg.v1 import common_pb2, worker_pb2
from tests.unit.wire.peers import H1, H2, Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until


def test_a_peer_tells_it_with_every_hello_and_that_counts_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr("jdisagg.api.peer.presence.PROBE_INTERVAL_S", 0.05)
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        d.client.watch((address,))
        for said in (Speed(10.0, 20.0), Speed(1.5, 1.5), None, Speed(2.0, 3.0)):
            monkeypatch.setattr(p.service, "_speed", lambda said=said: said)
            await until(lambda said=said: d.usable(address) and d.client.speed(address) == said)
        assert d.client.speed("nobody:1") is None
        monkeypatch.setattr("jdisagg.api.peer.book.SPEED_S", 0.0)
        assert d.client.speed(address) is None
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_hand_off_that_needs_no_hello_makes_what_was_said_no_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        p, d = Prefill(identity()), Decode()
        address = await p.start()
        monkeypatch.setattr(p.service, "_speed", lambda: Speed(1.0, 2.0))
        d.client.open(address, H1, opening())
        await until(lambda: d.client.speed(address) == Speed(1.0, 2.0))
        monkeypatch.setattr("jdisagg.api.peer.book.SPEED_S", 0.3)
        await until(lambda: d.client.speed(address) is None)
        d.client.open(address, H2, opening())
        await until(lambda: len(p.opened()) == 2)
        assert d.client.speed(address) is None
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize(
    ("least", "most"), [(2.0, 1.0), (-1.0, 1.0), (0.0, 0.0), (1.0, inf), (inf, inf), (nan, 1.0), (1.0, nan), (0.0, 1e-60)]
)
def test_one_that_is_none_is_not_known(least: float, most: float) -> None:
    """Others divide by it."""
    wire = worker_pb2.Load(running=1, speed=common_pb2.Speed(least=least, most=most))
    assert decode_load(wire) == Load(running=1)
