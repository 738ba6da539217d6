"""A request survives the death of whoever has it, in the states that are hardest to meet by chance.

All states, victims and figures: scripts/drills.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from chaos_kit.act import Blow, Victim
from chaos_kit.cell import Cell, CellRunner
from chaos_kit.drill_report import cell_table
from chaos_kit.gaps import GapDrill, Trouble
from chaos_kit.gaps import everything_asked as load_asked
from chaos_kit.stages import MAX_MODEL_LEN, Stage, drill_plan
from chaos_kit.stages import everything_asked as table_asked
from drills import TABLE_SLOTS, ready_fleet

from tests.e2e.tiny_model import make_tiny_model

CELLS = (
    (Stage.TRANSFERRING, Victim.PREFILL, Blow.STOP),
    (Stage.PUBLISHED, Victim.DECODE, Blow.KILL),
    (Stage.D_MEMORY, Victim.PREFILL, Blow.KILL),
    (Stage.D_SLOT, Victim.ROUTER, Blow.KILL),
    (Stage.DECODING, Victim.DECODE, Blow.KILL),
)
GAP_LIMIT_S = 30.0  # a hang is a failure; times are printed, machines differ
LIMIT_S = 600.0
TRIES = 8  # to strike a prompt that takes a tenth of a second


async def drilled(model: Path, directory: Path) -> tuple[list[Cell], GapDrill, list[str]]:
    async with httpx.AsyncClient(trust_env=False) as http:
        plan = drill_plan(str(model), slots=TABLE_SLOTS)
        async with ready_fleet(plan, (*table_asked(), *load_asked()), directory, http) as (fleet, answers):
            cells = [await CellRunner(fleet, answers).run(*cell) for cell in CELLS]
            drill = GapDrill(fleet, answers)
            for _ in range(TRIES):
                await drill.strike("P", Trouble.HOLE)
                if any(figures.gaps_s for figures in drill.figures.values()):
                    break  # else the prompt it was meant for was computed and gone when it came
            return cells, drill, fleet.complaints()


@pytest.mark.covers("X22")
@pytest.mark.timeout(LIMIT_S + 30)
def test_whoever_dies_in_whatever_state_the_stream_is_exact_and_nothing_is_left(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_model_len=MAX_MODEL_LEN)
    cells, drill, unasked = asyncio.run(asyncio.wait_for(drilled(model, tmp_path), LIMIT_S))
    print(f"\n{cell_table(cells)}")
    for cell in cells:
        assert cell.ok, cell
        assert cell.ending.gap_s is None or cell.ending.gap_s < GAP_LIMIT_S
    assert [cell.ending.became for cell in cells] == ["exact"] * 3 + ["lost with its router", "exact"]
    assert "other_prefill" in cells[2].ending.went_on  # noticed although the request had no pages yet
    assert "replay" in cells[4].ending.went_on
    assert not unasked
    assert drill.is_fine, drill.figures
    (figures,) = drill.figures.values()
    assert figures.missed == figures.strikes - 1
    assert figures.became == {"exact": 6 * figures.strikes}
