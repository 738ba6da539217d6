"""The fleet that chaos strikes: of which version its processes are, and when it misses one, and how one has to fall."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.member import Member
from chaos_kit.proxy import Proxy

from jdisagg.serve.ready import Ready
from tests.unit.waiting import until


def test_every_second_process_is_of_the_other_checkout_and_a_place_changes_when_it_restarts(tmp_path: Path) -> None:
    package = tmp_path / "other" / "jdisagg" / "serve"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text("import sys; sys.exit('I am the other one')")

    async def body() -> None:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(FleetPlan(model="", beside=tmp_path / "other"), tmp_path, http)
            first, second = (Member(name, "--role", directory=tmp_path, http=http) for name in ("D1", "D2"))

            async def is_other(member: Member) -> bool:
                fleet.launch(member)
                until(lambda: member.gone)
                await member.reap()
                said = member.log.read_text()
                assert ("I am the other one" in said) != ("--role: expected one argument" in said), said
                return "I am the other one" in said

            assert [await is_other(one) for one in (first, second, first, second)] == [True, False, False, True]

    asyncio.run(body())


def test_a_worker_is_missed_once_no_router_knows_it(tmp_path: Path) -> None:
    known = {"r1": ["127.0.0.1:7", "127.0.0.1:8"], "r2": ["127.0.0.1:7"]}
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if len(asked) == 1:
            raise httpx.ConnectError("not yet")
        return httpx.Response(200, json={"members": [{"address": address} for address in known[request.url.host]]})

    async def body() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            fleet = Fleet(FleetPlan(model=""), tmp_path, http)
            for name in known:
                router = Member(name, directory=tmp_path, http=http)
                router.ready = Ready(role="router", http=name, grpc=None, model="")
                fleet.routers.append(router)
            worker = Member("P1", directory=tmp_path, http=http, proxy=Proxy(lambda *_: None))
            assert worker.proxy is not None
            worker.proxy.port = 7
            with pytest.raises(RuntimeError, match=r"not missed within 1 s: r1 knows 127\.0\.0\.1:7; r2 knows 127\.0\.0\.1:7"):
                await fleet.until_missed([worker], 1.0)
            del known["r2"][0]
            with pytest.raises(RuntimeError, match=r"r1 knows 127\.0\.0\.1:7$"):
                await fleet.until_missed([worker], 0.2)
            del known["r1"][0]
            await fleet.until_missed([worker], 0.2)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("signal.signal(signal.SIGRTMIN, lambda *_: os._exit(71))", ""),
        ("signal.signal(signal.SIGRTMIN, lambda *_: os._exit(0))", "ended with 0, not with 71"),
        ("", f"ended with -{signal.SIGRTMIN:d}, not with 71"),
        ("signal.signal(signal.SIGRTMIN, signal.SIG_IGN)", "has not ended 0.5 s after"),
    ],
)
def test_a_worker_whose_engine_breaks_has_to_end_by_itself_and_to_say_so(tmp_path: Path, program: str, trouble: str) -> None:
    async def body() -> None:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(FleetPlan(model=""), tmp_path, http)
            begun = tmp_path / "begun"
            code = f"import os, signal, time; {program}\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)"
            member = Member("P1", directory=tmp_path, http=http, enter=(sys.executable, "-c", code))
            fleet.launch(member)
            until(begun.exists)
            fleet.break_engine(member)
            try:
                with pytest.raises(RuntimeError, match=trouble) if trouble else nullcontext():
                    await fleet.until_fallen(member, 0.5 if "has not" in trouble else 30.0)
            finally:
                member.kill()
                await member.reap()

    asyncio.run(body())


def test_a_fleet_complains_of_a_process_that_died_by_itself_and_of_a_traceback_but_not_of_an_engine_made_to_fail(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(FleetPlan(model=""), tmp_path, http)
            fleet.decode = [Member("D1", directory=tmp_path, http=http)]
            fleet.decode[0].incarnation = 1
            fleet.decode[0].log.write_text("E step failed: Traceback (most recent call last) ... EngineBroken: asked to")
            assert fleet.complaints() == []
            with fleet.decode[0].log.open("a") as log:
                log.write("\nE Traceback (most recent call last) ... KeyError: 5\n")
            fleet.ended.append(("D1", 70, "bye"))
            assert fleet.complaints() == [
                "died by itself: D1, exit status 70: bye",
                "traceback in a log: D1: E Traceback (most recent call last) ... KeyError: 5",
            ]

    asyncio.run(body())
