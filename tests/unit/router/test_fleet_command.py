"""`python -m jdisagg.fleet` against a router and its workers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from time import monotonic
from typing import Any

import grpc.aio
import pytest

from jdisagg import fleet
from jdisagg.api import channels
from jdisagg.api.admin import AdminService
from jdisagg.api.channels import Credentials
from jdisagg.api.http.server import HttpServer
from jdisagg.api.http.staged import StagedApp
from jdisagg.api.listening import listen
from jdisagg.core.fleet import ProcessFacts
from jdisagg.core.requests import Role
from jdisagg.core.settings import API_KEY_VARIABLE
from jdisagg.v1 import admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import stop
from tests.unit.wire.rig import IMPATIENT, run_quiet, start_server, until

WHY = "no prefill worker answers"


async def run(*argv: str) -> int:
    """The exit status of a command; the loop goes on serving meanwhile."""
    return await asyncio.to_thread(fleet.main, argv)


class Admin:
    """The admin service of a process with some requests."""

    def __init__(self, unfinished: int = 0) -> None:
        self.drained_until_s: list[float] = []
        self._unfinished = unfinished

    async def start(self, *, has_cache: bool = True, credentials: Credentials | None = None) -> tuple[grpc.aio.Server, str]:
        service = AdminService(drain=self._drain, stats=self._stats, reset_prefix_cache=self._reset if has_cache else None)
        if credentials is None:
            return await start_server(lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server))
        server = channels.make_server(credentials)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
        address = channels.bind(server)
        await server.start()
        return server, address

    async def _drain(self, deadline_s: float) -> int:
        self.drained_until_s.append(deadline_s - asyncio.get_running_loop().time())
        return self._unfinished

    async def _stats(self) -> dict[str, Any]:
        return {"queues": {"waiting": 2}}

    async def _reset(self) -> int:
        return 17


def test_list_shows_every_worker_with_its_state_its_load_and_why_it_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        router = await Router().start()
        assert await run("list", "--router", router.address) == 0
        assert capsys.readouterr().out == "no worker is registered\n"
        well = FakeWorker((router.address,), process=ProcessFacts(build="1.2", http_address="10.0.0.3:8001"))
        unready = FakeWorker((router.address,), name="demo")
        well.uptime_s = 7300
        prefill = FakeWorker((router.address,), Role.PREFILL)
        unready.not_ready = WHY
        for worker in (well, unready, prefill):
            await worker.start()
        await until(lambda: router.linked() == 2 and len(router.engine.workers.members()) == 3)
        assert await run("list", "--router", router.address) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (
            lines[0].split()
            == "ROLE ADDRESS STATE OF ROUTER RUNNING WAITING FREE PAGES MODEL WEIGHTS VERSION UPTIME HTTP WORKER".split()
        )
        rows = {row.split()[1]: row.split() for row in lines[1:] if not row.startswith(" ")}
        assert rows[well.address][:7] == ["decode", well.address, "serving", "0", "0", "0", "10/10"]
        assert rows[well.address][7:13] == ["demo", "weights-", "1.2", "2", "h", "10.0.0.3:8001"]
        assert rows[unready.address][9:12] == ["?", "?", "?"], "of a version that does not say"
        assert rows[unready.address][2] == "not-ready"
        assert rows[prefill.address][:3] == ["prefill", prefill.address, "serving"]
        assert len(lines) == 5
        assert lines[[row.split()[1] for row in lines].index(unready.address) + 1] == f"    {WHY}"
        metrics = router.metrics.text().splitlines()
        for state, count in (("serving", 1), ("not-ready", 1), ("unreached", 0)):
            assert f'jdisagg_worker_states{{role="decode",state="{state}"}} {count}.0' in metrics
        assert 'jdisagg_worker_states{role="prefill",state="serving"} 1.0' in metrics
        assert await run("list", "--router", router.address, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        found = {worker["member"]["address"]: worker for worker in told["workers"]}
        assert found[unready.address]["standing"] == {"state": "not-ready", "why": WHY, "requests": 0, "missing_without": ""}
        assert (len(found), told["lost"]) == (3, [])
        assert found[well.address]["member"]["load"]["free_pages"] == 10
        assert found[well.address]["member"]["identity"]["build"] == "1.2"
        assert found[well.address]["member"]["uptime_s"] == "7300"
        await stop(router, well, unready, prefill)

    run_quiet(body())


async def leave(router: Router, worker: FakeWorker) -> None:
    """In good order: it ends once the router knows that it drains."""
    worker.draining = True
    await worker.announce()
    await until(lambda: any(each.draining for each in router.engine.workers.members() if each.address == worker.address))
    await worker.die()


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_list_names_below_the_table_who_was_lost_and_not_who_has_left_or_is_back(
    role: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        stays, leaves, dies = (FakeWorker((router.address,), role) for _ in range(3))
        for worker in (stays, leaves, dies):
            await worker.start()
        await until(lambda: len(router.engine.workers.members()) == 3)
        await until(lambda: role is Role.PREFILL or router.linked() == 3)
        await leave(router, leaves)
        began_s = monotonic()
        await dies.die()
        await until(lambda: len(router.engine.workers.members()) == 1)
        assert await run("list", "--router", router.address) == 0
        _, row, *below = capsys.readouterr().out.splitlines()
        assert row.split()[1] == stays.address
        why = "its heartbeats stopped" if role is Role.PREFILL else "its stream broke \\(.+\\)|it closed its stream"
        assert len(below) == 1
        assert re.fullmatch(rf"lost \d+ s ago: {role.value} fake @ {dies.address}, ({why})", below[0])
        assert await run("list", "--router", router.address, "--json") == 0
        [lost] = json.loads(capsys.readouterr().out)["lost"]
        assert (lost["role"], lost["worker"]) == (role.value, f"fake @ {dies.address}")
        assert re.fullmatch(why, lost["why"])
        assert 0 <= int(lost["ago_ms"]) <= 1000 * (monotonic() - began_s)
        await dies.start(dies.port)
        await until(lambda: len(router.engine.workers.members()) == 2)
        await until(lambda: role is Role.PREFILL or router.linked() == 2)
        assert await run("list", "--router", router.address) == 0
        assert "lost" not in capsys.readouterr().out
        await leave(router, dies)
        await stays.die()
        await until(lambda: not router.engine.workers.members())
        assert await run("list", "--router", router.address) == 0
        first, *below = capsys.readouterr().out.splitlines()
        assert first == "no worker is registered"
        assert [stays.address in line for line in below] == [True], "what came back has left since then"
        await router.stop()

    run_quiet(body())


def test_what_a_worker_says_of_itself_reaches_no_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(fleet_pb2_grpc.FleetServiceServicer):
        async def List(self, request: fleet_pb2.ListRequest, context: object) -> fleet_pb2.ListResponse:
            odd = fleet_pb2.Member(role="\x1b[2J", address="h:1\n", model="m" * 5000)
            lost = fleet_pb2.LostWorker(role="\x1b[2J", worker="\x1b[2J" * 500, why="\x07")
            return fleet_pb2.ListResponse(members=[odd], standings=[fleet_pb2.Standing(state="\x07", why="a\nb")], lost=[lost])

    async def body() -> None:
        server, address = await start_server(lambda s: fleet_pb2_grpc.add_FleetServiceServicer_to_server(Odd(), s))
        assert await run("list", "--router", address) == 0
        out = capsys.readouterr().out
        assert all(line.isprintable() for line in out.splitlines())
        assert len(out) < 4000
        assert "a\\nb" in out
        await server.stop(0)

    run_quiet(body())


def test_a_router_of_an_older_version_tells_no_standings_and_is_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    class Old(fleet_pb2_grpc.FleetServiceServicer):
        async def List(self, request: fleet_pb2.ListRequest, context: object) -> fleet_pb2.ListResponse:
            there = fleet_pb2.Member(role="decode", address="h:1", model="demo")
            leaving = fleet_pb2.Member(role="decode", address="h:2", model="demo", draining=True)
            return fleet_pb2.ListResponse(members=[there, leaving])

    async def body() -> None:
        server, address = await start_server(lambda s: fleet_pb2_grpc.add_FleetServiceServicer_to_server(Old(), s))
        assert await run("list", "--router", address) == 0
        _, there, leaving = capsys.readouterr().out.splitlines()
        assert there.split()[1:4] == ["h:1", "?", "?"]
        assert leaving.split()[1:4] == ["h:2", "draining", "?"]
        await server.stop(0)

    run_quiet(body())


@pytest.mark.parametrize("unfinished", [0, 3])
def test_drain_waits_and_says_whether_the_process_can_be_ended(unfinished: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        admin = Admin(unfinished)
        server, address = await admin.start()
        status = await run("drain", address, "--wait-s", "7")
        assert admin.drained_until_s == [pytest.approx(7.0, abs=1.0)]
        out = capsys.readouterr().out
        if unfinished:
            assert (status, out) == (1, f"{address} takes no new requests; 3 still run after 7 s\n")
        else:
            assert status == 0
            assert out == f"{address} takes no new requests, and none runs: its process can be ended (SIGTERM)\n"
        await server.stop(0)

    run_quiet(body())


def test_state_and_reset_cache_show_what_the_process_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        server, address = await Admin().start()
        assert await run("state", address) == 0
        assert json.loads(capsys.readouterr().out) == {"queues": {"waiting": 2}}
        assert await run("reset-cache", address) == 0
        assert capsys.readouterr().out == f"{address} has forgotten cached prefixes of 17 pages\n"
        await server.stop(0)
        server, address = await Admin().start(has_cache=False)
        assert await run("reset-cache", address) == 1
        assert f"{address}: UNIMPLEMENTED: a router has no prefix cache" in capsys.readouterr().err
        await server.stop(0)

    run_quiet(body())


def test_who_does_not_answer_or_serves_something_else_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        server, address = await Admin().start()
        assert await run("list", "--router", address) == 1
        assert f"{address} is no process that serves this: `list` asks a router" in capsys.readouterr().err
        await server.stop(0)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
            assert await run("state", nowhere) == 1
        err = capsys.readouterr().err
        told = f"{nowhere} does not answer: give the address of a gRPC server that runs (--grpc-port); UNAVAILABLE: "
        assert err.startswith(f"jdisagg.fleet: {told}")
        assert err.count("\n") == 1

    run_quiet(body())


def test_who_is_at_the_http_port_is_told_that_and_not_what_grpc_makes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        server = HttpServer(StagedApp(), listen())
        await server.start()
        assert await run("list", "--router", server.address) == 1
        said = f"{server.address} answers, but not in gRPC: it may be an HTTP port; give that of its gRPC server (--grpc-port)"
        assert capsys.readouterr().err == f"jdisagg.fleet: {said}\n"
        await server.stop(0.0)

    run_quiet(body())


def test_the_key_is_read_from_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        server, address = await Admin().start(credentials=Credentials(api_key="one\ntwo"))
        assert await run("state", address) == 1
        assert f"{address}: UNAUTHENTICATED: missing or wrong API key" in capsys.readouterr().err
        monkeypatch.setenv(API_KEY_VARIABLE, "two\n")
        assert await run("state", address) == 0
        await server.stop(0)

    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    run_quiet(body())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("drain",), "the following arguments are required: HOST:PORT"),
        (("list", "--router", "h:99999"), "--router: got 'h:99999', wanted HOST:PORT with a port of 1 to 65535"),
        (("state", "here"), "HOST:PORT: got 'here', wanted HOST:PORT"),
        (("list", "--router", "a:1,b:2"), "--router: wanted one address, got 'a:1,b:2'"),
        (("drain", "h:1", "--wait-s", "-1"), "--wait-s: wanted 0 to 86400 seconds, got -1"),
        (("drain", "h:1", "--wait-s", "nan"), "--wait-s: wanted 0 to 86400 seconds, got nan"),
        (("dran", "h:1"), "invalid choice: 'dran'"),
    ],
)
def test_a_command_that_cannot_be_run_says_what_to_change(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("jdisagg.fleet: ")
    assert err.count("\n") == 1


def test_a_bad_key_is_a_bad_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "two words")
    assert fleet.main(("list",)) == 2
    assert f"{API_KEY_VARIABLE}: a key of 9 characters" in capsys.readouterr().err


def test_it_starts_without_jax() -> None:
    code = "import sys, jdisagg.fleet; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
