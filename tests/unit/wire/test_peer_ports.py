"""Backends with a port of their own: proven before KV begins over them, and what a port that D does not reach costs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from jdisagg.api.channels import join_address
from jdisagg.api.peer import ports as peer_ports
from jdisagg.api.peer.ports import PeerPorts, Reached, Unreachable
from jdisagg.handoff.identity import Backend
from jdisagg.handoff.messages import Agreed, HandoffId
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.wire.peers import H1, H2, OTHER_SHM, SHM, Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until

GRPC, TCP = Backend(name="grpc"), Backend(name="tcp")
OF_D = (SHM, TCP, GRPC)
NOT_YET = 30.0


def tcp(endpoint: str) -> Backend:
    return Backend(name="tcp", endpoint=endpoint)


@pytest.fixture
def store() -> Iterator[TcpStore]:
    made = TcpStore("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def refusing() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(peer_ports, "PATIENCE_S", NOT_YET)
    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 5.0)


class Firewall:
    """In the place of `_connect`: swallows connections until it is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self.tries = 0

    async def __call__(self, _addresses: Any) -> str | None:
        self.tries += 1
        if not self.is_open:
            await asyncio.sleep(NOT_YET)
        return None


@pytest.fixture
def firewall(monkeypatch: pytest.MonkeyPatch) -> Firewall:
    made = Firewall()
    monkeypatch.setattr(peer_ports, "_connect", made)
    return made


def reaching(*of_p: Backend, agreed: tuple[str, ...] = ("tcp", "grpc"), times: int = 1) -> Reached:
    """What one pairing reaches, asked so often."""
    answers: list[Reached] = []

    async def body() -> None:
        ports = PeerPorts()
        for _ in range(times):
            answers.append(await ports.reach(identity(backends=of_p), agreed))
            await asyncio.sleep(0.01)
        await ports.close()

    run_quiet(body())
    return answers[-1]


def test_a_port_that_accepts_is_used_and_sees_one_connection_per_pairing(store: TcpStore) -> None:
    accepted: list[str] = []
    serve = store._serve
    store._serve = lambda connection, peer: (accepted.append(peer), serve(connection, peer))[1]
    assert reaching(tcp(join_address(*store.address)), GRPC, times=3) == Reached(("tcp", "grpc"))
    assert len(accepted) == 1


def test_a_port_that_refuses_is_left_out_at_once(refusing: str) -> None:
    began_s = monotonic()
    reached = reaching(tcp(refusing), GRPC)
    assert reached.backends == ("grpc",)
    (failed,) = reached.unreachable
    assert (failed.backend, failed.endpoint) == ("tcp", refusing)
    assert "refused" in failed.why
    assert monotonic() - began_s < NOT_YET / 2


@pytest.mark.covers("X24")
@pytest.mark.parametrize("endpoint", ["", "x", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1", "..:1"])
def test_what_is_no_address_is_not_reachable(endpoint: str) -> None:
    assert [failed.endpoint for failed in reaching(tcp(endpoint), GRPC, times=2).unreachable] == [endpoint]


@pytest.mark.covers("X24")
def test_a_name_and_an_ipv6_address_are_reached() -> None:
    for bind, name in (("::1", ""), ("127.0.0.1", "localhost")):
        store = TcpStore(bind, name)
        try:
            assert reaching(tcp(join_address(*store.address)), GRPC).backends == ("tcp", "grpc")
        finally:
            store.close()


def test_a_peer_that_says_no_port_is_used_unproven(firewall: Firewall) -> None:
    assert reaching(TCP, GRPC) == Reached(("tcp", "grpc"))
    assert firewall.tries == 0


def test_a_port_that_the_pair_does_not_use_is_left_alone(firewall: Firewall) -> None:
    assert reaching(tcp("127.0.0.1:1"), GRPC, agreed=("grpc",)) == Reached(("grpc",))
    assert firewall.tries == 0


def test_behind_a_better_backend_a_port_costs_no_wait_and_is_believed_until_it_failed(
    firewall: Firewall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 0.1)

    async def body() -> None:
        ports, agreed = PeerPorts(), ("shm", "tcp", "grpc")
        theirs = identity(backends=(SHM, tcp("127.0.0.1:1"), GRPC))
        assert await ports.reach(theirs, agreed) == Reached(agreed)
        while "tcp" in (await ports.reach(theirs, agreed)).backends:
            await asyncio.sleep(0.01)
        assert (await ports.reach(theirs, agreed)).backends == ("shm", "grpc")
        await ports.close()

    run_quiet(body())


def test_the_only_backend_is_used_whatever_its_proof_says(refusing: str) -> None:
    assert reaching(tcp(refusing), agreed=("tcp",)).backends == ("tcp",)


def test_a_firewall_costs_hand_offs_a_moment_and_it_is_tried_again(firewall: Firewall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ports, "PATIENCE_S", 0.1)
    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 2.0)
    monkeypatch.setattr(peer_ports, "AGAIN_S", 0.1)

    async def body() -> None:
        ports, agreed = PeerPorts(), ("tcp", "grpc")
        theirs = identity(backends=(tcp("127.0.0.1:1"), GRPC))
        waited_s: list[float] = []
        for _ in range(20):
            began_s = monotonic()
            reached = await ports.reach(theirs, agreed)
            waited_s.append(monotonic() - began_s)
            if reached.unreachable:
                break
            assert reached == Reached(("grpc",), pending=("tcp",))
        assert sorted(waited_s)[len(waited_s) // 2] < 0.1, "one waits for PATIENCE_S, the others for nothing"
        while not (reached := await ports.reach(theirs, agreed)).unreachable:
            await asyncio.sleep(0.01)
        assert reached == Reached(("grpc",), (Unreachable("tcp", "127.0.0.1:1", "no answer within 2 s"),))
        firewall.is_open = True
        while (await ports.reach(theirs, agreed)) != Reached(agreed):
            await asyncio.sleep(0.01)
        tries = firewall.tries
        await asyncio.sleep(0.3)
        assert firewall.tries == tries, "proven is proven"
        await ports.close()

    run_quiet(body())


def test_another_process_at_the_peers_address_is_proven_anew(firewall: Firewall) -> None:
    firewall.is_open = True

    async def body() -> None:
        ports = PeerPorts()
        for epoch in ("a", "a", "b"):
            assert (await ports.reach(identity(epoch=epoch, backends=(tcp("127.0.0.1:1"), GRPC)), ("tcp", "grpc"))).backends[
                0
            ] == "tcp"
        assert firewall.tries == 2
        await ports.close()

    run_quiet(body())


def test_a_resolver_that_does_not_answer_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def silent(*_: Any, flags: int, **__: Any) -> list[Any]:
        if not flags:
            answers.wait(20.0)
        raise socket.gaierror("not found")

    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", silent)
        began_s = monotonic()
        assert "no answer" in reaching(tcp("there:1"), GRPC).unreachable[0].why
        assert monotonic() - began_s < 15.0
        answers.set()


# --- of a whole client


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
            assert d.client.snapshot() == {address: {"backends": ["grpc"], "why_not": ""}}
            answers.set()
            await asyncio.sleep(0.1)  # a few turns of the loop are enough
            assert await hand_off(d, address, H2) == ("tcp", "grpc")
            assert d.client.snapshot() == {address: {"backends": ["tcp", "grpc"], "why_not": ""}}
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
        d.client._failed(d.client._link(address), "another stream's heartbeats stopped")
        await until(p.opened)
        assert d.ends(H1) == []
        await d.client.aclose()
        await p.server.stop(0)

    run_quiet(body())
