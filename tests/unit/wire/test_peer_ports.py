"""Backends with a port of their own: which ports are proven before KV begins over them, and what one that is not costs."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from jdisagg.api.channels import join_address
from jdisagg.api.peer import ports as peer_ports
from jdisagg.api.peer.ports import PeerPorts, Reached, Unreachable
from jdisagg.handoff.identity import Backend
from jdisagg.transfer.tcp_store import TcpStore
from tests.unit.wire.peers import SHM
from tests.unit.wire.rig import identity, run_quiet
from tests.unit.wire.tcp_ports import GRPC, NOT_YET, TCP, Firewall, tcp

pytestmark = pytest.mark.usefixtures("patient_proofs")


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


def test_what_a_hand_off_did_not_reach_is_left_out_for_a_while_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ports, agreed = PeerPorts(), ("jax", "grpc")
        theirs = identity(backends=(Backend(name="jax"), GRPC))
        assert await ports.reach(theirs, agreed) == Reached(agreed)
        ports.unreached("jax", "timed out")
        assert await ports.reach(theirs, agreed) == Reached(("grpc",), (Unreachable("jax", "", "timed out"),))
        assert await ports.reach(theirs, ("jax",)) == Reached(("jax",), (Unreachable("jax", "", "timed out"),)), "the only one"
        assert await ports.reach(theirs, ("grpc",)) == Reached(("grpc",)), "it was not agreed on"
        assert await ports.reach(replace(theirs, epoch="another process"), agreed) == Reached(agreed)
        monkeypatch.setattr(peer_ports, "AGAIN_S", 0.1)
        ports.unreached("jax", "timed out")
        while (await ports.reach(replace(theirs, epoch="another process"), agreed)) != Reached(agreed):
            await asyncio.sleep(0.01)
        await ports.close()

    run_quiet(body())


def test_a_proven_port_that_a_hand_off_does_not_reach_is_left_out_until_it_accepts_again(
    firewall: Firewall, monkeypatch: pytest.MonkeyPatch
) -> None:
    firewall.is_open = True
    monkeypatch.setattr(peer_ports, "PROOF_TIMEOUT_S", 0.1)
    monkeypatch.setattr(peer_ports, "SOON_S", 0.05)

    async def body() -> None:
        ports, agreed = PeerPorts(), ("tcp", "grpc")
        theirs = identity(backends=(tcp("127.0.0.1:1"), GRPC))
        assert await ports.reach(theirs, agreed) == Reached(agreed)
        firewall.is_open = False
        ports.unreached("tcp", "timed out")
        assert await ports.reach(theirs, agreed) == Reached(("grpc",), (Unreachable("tcp", "127.0.0.1:1", "timed out"),))
        while (await ports.reach(theirs, agreed)).unreachable[0].why == "timed out":
            await asyncio.sleep(0.01)
        tries = firewall.tries
        ports.unreached("tcp", "what a hand-off says that began before")
        assert (await ports.reach(theirs, agreed)).unreachable[0].why == "no answer within 0.1 s", (
            "it is known, and being tried"
        )
        assert firewall.tries == tries
        firewall.is_open = True
        while await ports.reach(theirs, agreed) != Reached(agreed):
            await asyncio.sleep(0.01)
        ports.unreached("tcp", "a moment ago")
        await asyncio.sleep(0.01)  # a few turns of the loop
        assert await ports.reach(theirs, agreed) == Reached(agreed), "it may have been a lost packet"
        await ports.close()
        firewall.is_open = False
        ports.unreached("tcp", "too late")  # and tries nothing any more

    run_quiet(body())


def test_a_port_is_tried_again_soon_and_then_more_and_more_seldom(firewall: Firewall, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    sleep = asyncio.sleep

    async def recorded(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await sleep(0)

    async def refusing(_addresses: Any) -> str:
        if len(pauses_s) == 9:
            firewall.is_open = True
        return "refused"

    async def body() -> None:
        ports = PeerPorts()
        with monkeypatch.context() as patched:
            patched.setattr(peer_ports, "_connect", refusing)
            patched.setattr(peer_ports.asyncio, "sleep", recorded)
            await ports.reach(identity(backends=(tcp("127.0.0.1:1"), GRPC)), ("tcp", "grpc"))
            while not firewall.is_open:
                await sleep(0.001)
            await ports.close()

    run_quiet(body())
    assert pauses_s[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_one_hand_off_tries_again_what_was_left_out_and_the_others_follow_when_it_was_not_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that tries a port that is shut waits for seconds."""
    monkeypatch.setattr(peer_ports, "AGAIN_S", 0.1)
    monkeypatch.setattr(peer_ports, "TRY_S", 60.0)

    async def body() -> None:
        ports, agreed = PeerPorts(), ("jax", "grpc")
        theirs = identity(backends=(Backend(name="jax"), GRPC))

        async def over(*, begins: bool = True) -> tuple[str, ...]:
            return (await ports.reach(theirs, agreed, begins=begins)).backends

        assert await over() == agreed
        for _ in range(2):
            ports.unreached("jax", "timed out")
            await asyncio.sleep(0.2)
            assert await over(begins=False) == ("grpc",), "who only asks whether the peer is there tries nothing"
            assert [await over() for _ in range(3)] == [agreed, ("grpc",), ("grpc",)]
        monkeypatch.setattr(peer_ports, "TRY_S", 0.1)
        ports.unreached("jax", "timed out")
        await asyncio.sleep(0.2)
        assert await over() == agreed
        await asyncio.sleep(0.2)
        assert [await over(begins=begins) for begins in (False, True, True)] == [agreed] * 3
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
        others_s = sorted(waited_s[1:])
        assert not others_s or others_s[len(others_s) // 2] < 0.1, "one waits for PATIENCE_S, the others for nothing"
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
