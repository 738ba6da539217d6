"""`python -m jdisagg.fleet drain` says before it drains a worker that nobody would be left to do its work."""

from __future__ import annotations

import socket

import pytest

from jdisagg import fleet
from jdisagg.core.requests import Role
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import stop
from tests.unit.router.test_fleet_command import Admin, run
from tests.unit.wire.rig import run_quiet, until


@pytest.mark.parametrize("by_default", [False, True])
def test_it_warns_of_the_last_worker_and_drains_it_all_the_same(
    by_default: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        router = await Router().start()
        monkeypatch.setattr(fleet, "_ROUTER", router.address)
        asked = () if by_default else ("--router", router.address)
        admin = Admin()
        server, address = await admin.start()
        decode = FakeWorker((router.address,))
        prefill, other = (FakeWorker((router.address,), Role.PREFILL) for _ in range(2))
        await decode.start()
        await prefill.start(advertised=address)
        await until(lambda: router.linked() == 1 and len(router.engine.workers.members()) == 2)
        assert await run("drain", address, *asked) == 0
        said = capsys.readouterr()
        nobody = "no other of its weights computes prompts: decode workers do it themselves"
        assert said.err == f"jdisagg.fleet: warning: prefill worker {address} drains, and {nobody}\n"
        assert said.out == f"{address} takes no new requests, and none runs: its process can be ended (SIGTERM)\n"
        await other.start()
        await until(lambda: len(router.engine.workers.members()) == 3)
        assert await run("drain", address, *asked) == 0
        assert capsys.readouterr().err == ""
        assert len(admin.drained_until_s) == 2
        await stop(router, decode, prefill, other)
        await server.stop(0)

    run_quiet(body())


def test_where_no_router_can_be_asked_that_is_said_if_one_was_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        router = await Router().start()
        server, address = await Admin().start()
        prefill = FakeWorker((router.address,), Role.PREFILL)
        await prefill.start()
        await until(lambda: len(router.engine.workers.members()) == 1)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
            for default in (nowhere, router.address, address):
                monkeypatch.setattr(fleet, "_ROUTER", default)
                assert await run("drain", address) == 0
                assert capsys.readouterr().err == ""
            unknown = "jdisagg.fleet: it is not known whether others do its work: "
            for named, why in (
                (nowhere, f"{nowhere} does not answer"),
                (router.address, f"router {router.address} has no worker of address {address}"),
                (address, f"{address} is no process that serves this"),
            ):
                assert await run("drain", address, "--router", named) == 0
                assert capsys.readouterr().err.startswith(unknown + why)
        assert await run("drain", address, "--router", "a:1,b:2") == 2
        assert "--router: wanted one address, got 'a:1,b:2'" in capsys.readouterr().err
        await stop(router, prefill)
        await server.stop(0)

    run_quiet(body())
