"""A transfer server for each receiver, while it is used."""

from __future__ import annotations

import weakref

import jax
import pytest

from jdisagg.transfer import jax_receivers
from jdisagg.transfer.jax_server import TransferServers, Unsupported


def test_every_receiver_has_a_server_until_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(jax_receivers, "monotonic", lambda: now_s[0])
    servers = jax_receivers.ServerPerReceiver(TransferServers(jax.devices(), "127.0.0.1"))
    first, busy = servers.of("d1", busy=[]), servers.of("d2", busy=[])
    assert first.address != busy.address
    assert servers.of("d1", busy=[]) is first
    now_s[0] += jax_receivers.IDLE_S + 1
    ended = weakref.ref(first)
    del first
    servers.end_idle(busy=[busy])
    assert ended() is None
    assert servers.of("d2", busy=[busy]) is busy
    ended = weakref.ref(busy)
    del busy
    now_s[0] += jax_receivers.IDLE_S + 1
    servers.of("d3", busy=[])
    assert ended() is None
    servers.clear()


def test_receivers_that_come_back_over_new_connections_do_not_pile_up_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_receivers, "MAX_SERVERS", 3)
    servers = jax_receivers.ServerPerReceiver(TransferServers(jax.devices(), "127.0.0.1"))
    first, busy = servers.of("d:1", busy=[]), servers.of("d:2", busy=[])
    ended = weakref.ref(first)
    assert servers.of("d:3", busy=[]) is not first
    assert servers.of("d:1", busy=[busy]) is first, "used again: d:3 is unused for longer"
    third = servers.of("d:4", busy=[busy])
    assert servers.of("d:1", busy=[busy]) is first
    with pytest.raises(Unsupported, match="3 receivers have offers"):
        servers.of("d:5", busy=[first, busy, third])
    assert servers.of("d:2", busy=[first, busy, third]) is busy, "those that have one keep it"
    del first
    servers.of("d:5", busy=[busy, third])
    assert ended() is None
    servers.clear()
