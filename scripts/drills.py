"""Strikes every process at every state of a request's life, and measures what its client sees.

    drills.py                                    the table: 9 states x router, P, D x kill -9, SIGSTOP
    drills.py --stages decoding,transferring     some of it

Prints one line per cell and writes everything with --json. Exit status 0: every cell was reached and ended as it must. One
fleet at a time: two routers, two P, two D; answers are computed beforehand by a unified server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from chaos_kit.act import Blow, Victim
from chaos_kit.cell import Answers, Cell, CellRunner
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.reference import unified_answers
from chaos_kit.stages import Stage, drill_plan, everything_asked

DEMO = Path(__file__).resolve().parent.parent / "jdisagg" / "demo"
SLOTS = 2  # of a D in the table's fleet


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(DEMO), help="a directory; default: the demo model")
    parser.add_argument("--stages", default=",".join(stage.name.lower() for stage in Stage), help="default: %(default)s")
    parser.add_argument("--victims", default=",".join(victim.value for victim in Victim), help="default: %(default)s")
    parser.add_argument("--blows", default=",".join(blow.name.lower() for blow in Blow), help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--directory", type=Path, help="of the logs; default: a new temporary one")
    return parser.parse_args()


def say(text: str) -> None:
    """A progress line."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def answers_of(plan: FleetPlan, asked: tuple[Any, ...], directory: Path, http: httpx.AsyncClient) -> Answers:
    """By a fresh unified server."""
    found = await unified_answers(plan, asked, directory, http)
    return {entry.prompt: answer[0] for entry, answer in zip(asked, found, strict=True)}


async def table(arguments: argparse.Namespace, directory: Path) -> list[Cell]:
    """All cells asked for, on one fleet."""
    plan = drill_plan(arguments.model, slots=SLOTS)
    stages = [Stage[name.upper()] for name in arguments.stages.split(",") if name]
    cells: list[Cell] = []
    async with httpx.AsyncClient(trust_env=False) as http:
        answers = await answers_of(plan, everything_asked(), directory, http)
        say("answers by unified")
        fleet = Fleet(plan, directory, http)
        try:
            await fleet.start()
            say("fleet is whole")
            runner = CellRunner(fleet, answers)
            for stage in stages:
                for victim in map(Victim, arguments.victims.split(",")):
                    for blow in (Blow[name.upper()] for name in arguments.blows.split(",")):
                        cells.append(await runner.run(stage, victim, blow))
                        say(line(cells[-1]))
        finally:
            await fleet.close()
    return cells


def line(cell: Cell) -> str:
    """One cell."""
    gap = f"{cell.gap_s * 1e3:.0f} ms" if cell.gap_s is not None else "-"
    return (
        f"{'ok ' if cell.ok else 'BAD'} {cell.blow} of {cell.victim}, {cell.stage}: {cell.became}, gap {gap}, {cell.went_on}"
        f" | seen {cell.seen!r}, try {cell.tries} | others {cell.others or '-'} | again {cell.again or '-'}"
        f" | left {cell.leaks or 'nothing'} after {cell.at_rest_s:.1f} s {cell.detail}"
    )


def main() -> int:
    """Returns the exit status."""
    arguments = parse()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="drills-"))
    directory.mkdir(parents=True, exist_ok=True)
    say(f"logs in {directory}")
    cells = asyncio.run(table(arguments, directory))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([cell.as_json() for cell in cells], indent=1))
    return 0 if cells and all(cell.ok for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
