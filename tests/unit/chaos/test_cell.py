"""A cell counts as reached only where the blow was felt."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from chaos_kit import cell
from chaos_kit.act import Blow, Victim
from chaos_kit.cell import TRIES, CellRunner
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.lookout import View
from chaos_kit.member import Member
from chaos_kit.stages import SUBJECTS, Stage
from chaos_kit.stream import Stream

from jdisagg.v1 import common_pb2


class Late:
    """An act that reaches its state, and whose blow nobody notices until the `felt`-th."""

    felt = TRIES + 1

    def __init__(self, fleet: Fleet, scene: Any, number: int) -> None:
        self.others: list[Stream] = []
        self.struck, self.struck_s = fleet.decode[0], 0.0
        recoveries = ("replay",) if number + 1 >= self.felt else ()
        self.subject = Stream(name="late", entry=SUBJECTS[0], provenance=common_pb2.Provenance(recoveries=recoveries))

    async def bring_about(self) -> View:
        return View()

    async def strike(self, victim: Victim, blow: Blow) -> None: ...

    def let_go(self) -> None: ...

    async def until_ended(self) -> None: ...

    async def heal(self) -> None: ...


@pytest.mark.parametrize(("felt", "reached"), [(1, True), (TRIES, True), (TRIES + 1, False)])
def test_a_blow_that_nobody_ever_notices_leaves_the_cell_unreached(
    felt: int, reached: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "Act", Late)
    monkeypatch.setattr(Late, "felt", felt)

    async def body() -> cell.Cell:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(FleetPlan(model=""), tmp_path, http)
            fleet.decode = [Member("D1", directory=tmp_path, http=http)]
            runner = CellRunner(fleet, {SUBJECTS[0].prompt: cell.Choice()})
            return await runner.run(Stage.DECODING, Victim.DECODE, Blow.KILL)

    found = asyncio.run(body())
    assert (found.reached, found.tries) == (reached, min(felt, TRIES))
    assert not (found.ok and not reached)
