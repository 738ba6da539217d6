"""A whole client of a P whose ports it reaches, or not: over what each hand-off comes, and what is said of that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from jdisagg.api.channels import join_address
from jdisagg.api.peer import ports as peer_ports
from jdisagg.handoff.identity import Backend
from jdisagg.handoff.messages import Agreed, HandoffId
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.wire.peers import H1, H2, OTHER_SHM, Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until
from tests.unit.wire.tcp_ports import GRPC, OF_D, Firewall, tcp

pytestmark = pytest.mark.usefixtures("patient_proofs")


async def hand_off(d: Decode, address: str, handoff: HandoffId) -> Any:
    """Open a stream; what was agreed for it."""
    d.client.open(address, handoff, opening())
    mine: Callable[[], list[object]] = lambda: [event.message for event in d.events if event.handoff == handoff]  # noqa: E731
    await until(mine)
    agreed = mine()[0]
    assert isinstance(agreed, Agreed)
    return agreed.backends


def peer_log(caplog: pytest.LogCaptureFixture, address: str) -> list[tuple[str, str]]:
    head = f"prefill peer {address}"
    return [(r.levelname, r.getMessage().removeprefix(head)) for r in caplog.records if r.getMessage().startswith(head)]


@pytest.mark.covers("P09")
def test_where_shm_does_not_pair_kv_comes_over_tcp_from_the_first_hand_off_on(
    store: TcpStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        p = Prefill(identity(backends=(OTHER_SHM, tcp(join_address(*store.address)), GRPC)))
        d = Decode(identity(epoch="d", backends=OF_D))
        address = await p.start()
        assert await hand_off(d, address, H1) == ("tcp", "grpc")
        await until(p.opened)
        assert p.opened()[0].message.backends == ("tcp", "grpc")
        assert peer_log(caplog, address) == [("INFO", ": KV comes over tcp, else grpc")]
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


@pytest.mark.covers("P09")
def test_a_port_that_d_does_not_reach_is_said_once_and_kv_comes_over_grpc(
    refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        p = Prefill(identity(backends=(OTHER_SHM, tcp(refusing), GRPC)))
        d = Decode(identity(epoch="d", backends=OF_D))
        address = await p.start()
        assert await hand_off(d, address, H1) == ("grpc",)
        assert await hand_off(d, address, H2) == ("grpc",)
        ((level, line),) = peer_log(caplog, address)
        assert level == "WARNING"
        assert line.startswith(f": backend tcp is not reachable at {refusing} (")
        assert line.endswith("refused); KV comes over grpc")
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_after_a_hand_off_that_reached_nothing_over_jax_the_next_ones_begin_over_grpc(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        jax, grpc = Backend(name="jax", version="1", num_transport_addresses=2), GRPC
        p, d = Prefill(identity(backends=(jax, grpc))), Decode(identity(epoch="d", backends=(jax, grpc)))
        address = await p.start()
        assert await hand_off(d, address, H1) == ("jax", "grpc")
        d.client.unreached(address, "jax", "fetch of [0, 256) over jax: unreachable")
        assert await hand_off(d, address, H2) == ("grpc",)
        assert await hand_off(d, address, HandoffId("r", 3)) == ("grpc",)
        over, (level, line) = peer_log(caplog, address)
        assert over == ("INFO", ": KV comes over jax, else grpc")
        assert level == "WARNING"
        ports = "on the free ports that it listens on (fetch of [0, 256) over jax: unreachable)"
        assert line == f": backend jax is not reachable {ports}; KV comes over grpc"
        d.client.unreached("nobody:1", "jax", "of one that has left")
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_port_that_is_still_tried_is_said_and_shown(
    refusing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(peer_ports, "PATIENCE_S", 0.1)

    answers = asyncio.Event()

    async def late(self: object) -> None:
        await answers.wait()

    async def body() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(peer_ports._Proof, "_attempt", late)
            p = Prefill(identity(backends=(tcp(refusing), GRPC)))
            d = Decode(identity(epoch="d", backends=OF_D))
            address = await p.start()
            assert await hand_off(d, address, H1) == ("grpc",)
            assert peer_log(caplog, address) == [("INFO", ": KV comes over grpc; tcp is still being tried")]
            assert d.client.snapshot() == {address: {"backends": ["grpc"], "why_not": "", "bits": ""}}
            answers.set()
            await asyncio.sleep(0.1)  # a few turns of the loop are enough
            assert await hand_off(d, address, H2) == ("tcp", "grpc")
            assert d.client.snapshot() == {address: {"backends": ["tcp", "grpc"], "why_not": "", "bits": ""}}
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_new_pairing_tries_the_port_again(refusing: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        p = Prefill(identity(backends=(tcp(refusing), GRPC)))
        d = Decode(identity(epoch="d", backends=OF_D))
        address = await p.start()
        assert await hand_off(d, address, H1) == ("grpc",)
        await p.server.stop(0)
        await until(lambda: d.ends(H1))
        host, port = refusing.rsplit(":", 1)
        with socket.create_server((host, int(port))):
            await p.start(int(address.rpartition(":")[2]))
            d.client.watch((address,))
            await until(lambda: d.usable(address))  # gRPC may have found nobody there, and tries again after a while
            assert await hand_off(d, address, H2) == ("tcp", "grpc")
        assert peer_log(caplog, address)[-1] == ("INFO", ": KV comes over tcp, else grpc")
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_static_peers_port_is_proven_before_the_first_hand_off(firewall: Firewall) -> None:
    firewall.is_open = True

    async def body() -> None:
        p, d = Prefill(identity(backends=(tcp("127.0.0.1:1"), GRPC))), Decode(identity(epoch="d", backends=OF_D))
        address = await p.start()
        d.client.watch((address,))
        await until(lambda: firewall.tries)
        assert await hand_off(d, address, H1) == ("tcp", "grpc")
        assert firewall.tries == 1
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())


def test_a_stream_that_waits_for_a_proof_keeps_its_channel(firewall: Firewall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may find the peer dead meanwhile, and give the connection up."""
    monkeypatch.setattr(peer_ports, "PATIENCE_S", 0.5)

    async def body() -> None:
        p, d = Prefill(identity(backends=(tcp("127.0.0.1:1"), GRPC))), Decode(identity(epoch="d", backends=OF_D))
        address = await p.start()
        d.client.open(address, H1, opening())
        await until(lambda: firewall.tries)
        d.client._failed(d.client._links.of(address), "another stream's heartbeats stopped")
        await until(p.opened)
        assert d.ends(H1) == []
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
