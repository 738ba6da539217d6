"""The fleet that chaos strikes: of which version its processes are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.member import Member

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
