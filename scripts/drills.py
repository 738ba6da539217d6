"""Strikes every process at every state of a request's life, and measures how long clients wait.

    drills.py --part table                       9 states x router, P, D x kill -9, SIGSTOP
    drills.py --part table --stages decoding,transferring --victims D
    drills.py --part gaps --times 50             kill -9, SIGSTOP, black hole of P and of D under load
    drills.py --part hosts --hold-s 5            router, P and D on hosts of their own, and the network between them breaks

Answers are computed beforehand by a unified server; then one fleet at a time: two routers, two P, two D, clients at the first
router. Over several hosts there is one router, and the fleet itself answers beforehand, undisturbed.
Exit status 0: every cell was reached and ended as it must, every stream under load was exact, nothing was left, no process died
by itself or left a traceback in a log; over several hosts no stream failed, but by name where its router reached no worker. 2:
hosts cannot be made here; all parts go without them then. Whether times stay within their targets is printed and written, and
does not decide: machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from bench_kit.machine import commit, load
from chaos_kit import cuts, gaps, stages
from chaos_kit.act import Blow, Victim
from chaos_kit.catalogue import LONG_MODEL_LEN, Entry, long_questions
from chaos_kit.cell import Answers, Cell, CellRunner
from chaos_kit.client import Clients
from chaos_kit.drill_report import cell_line, cell_table, cut_line, cut_table, gap_table, machine_line
from chaos_kit.fleet import Fleet, FleetPlan
from chaos_kit.gaps import GapDrill, Trouble
from chaos_kit.host_drill import HostDrill
from chaos_kit.host_fleet import HostFleet
from chaos_kit.network import Network, NoNetwork, way_in
from chaos_kit.reference import unified_answers
from chaos_kit.stages import Stage, drill_plan

DEMO = Path(__file__).resolve().parent.parent / "jdisagg" / "demo"
TABLE_SLOTS = 2  # of a D: others can fill them
GAP_SLOTS, GAP_PAGES = 16, 400  # a survivor takes every stream
HOST_SIZES = (
    *("--max-model-len", str(LONG_MODEL_LEN), "--page-size", "16", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "64", "--transfer-chunk-tokens", "64"),
)
PARTS = ("table", "gaps", "hosts")
INSIDE = "JDISAGG_DRILLS_INSIDE"  # set: this process has a network of its own


def apart() -> str:
    """Half of the cores for prefill, half for decode: on machines of their own they take nothing from each other either."""
    cores = sorted(map(str, os.sched_getaffinity(0)), key=int)
    half = len(cores) // 2
    return f"{','.join(cores[:half])}:{','.join(cores[half:])}" if half else ""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--times", type=int, default=5, help="strikes of each kind under load")
    parser.add_argument("--model", default=str(DEMO), help="a directory; default: the demo model")
    parser.add_argument("--stages", **_some(_by_name(Stage)))
    parser.add_argument("--victims", **_some({victim.value: victim for victim in Victim}))
    parser.add_argument("--blows", **_some(_by_name(Blow)))
    parser.add_argument("--troubles", **_some(_by_name(Trouble), "under load; "))
    parser.add_argument("--roles", **_some({role: role for role in ("P", "D")}, "under load; "))
    parser.add_argument("--cores", default=apart(), help="under load: of the P and of the D, '' for any; default: %(default)s")
    parser.add_argument("--cuts", **_some(cuts.BY_NAME, "of the network between hosts; "))
    parser.add_argument("--hold-s", type=float, default=5.0, help="how long each lasts; default: %(default)g")
    parser.add_argument("--streams", type=int, default=24, help="during each; default: %(default)d")
    parser.add_argument(
        "--kv-transfer-backend", choices=("tcp", "grpc", "jax"), default="tcp", help="between hosts; default: tcp"
    )
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--directory", type=Path, help="of the logs; default: a new temporary one")
    return parser.parse_args()


def _by_name(kind: type[Stage] | type[Blow] | type[Trouble]) -> dict[str, Any]:
    return {one.name.lower(): one for one in kind}


def _some(known: Mapping[str, object], about: str = "") -> dict[str, Any]:
    """A flag for some of the `known`, comma-separated; all by default."""

    def read(text: str) -> list[object]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, wanted some of {', '.join(known)}")
        return [known[name] for name in text.split(",")]

    return {"type": read, "default": ",".join(known), "help": f"{about}default: %(default)s"}


def say(text: str) -> None:
    """A progress line."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@asynccontextmanager
async def ready_fleet(
    plan: FleetPlan, asked: tuple[Entry, ...], directory: Path, http: httpx.AsyncClient
) -> AsyncIterator[tuple[Fleet, Answers]]:
    """The right answers, by a fresh unified server that is gone then, and a whole fleet, ended at the end."""
    answers = await unified_answers(plan, asked, directory, http)
    say(f"{len(answers)} answers by unified")
    fleet = Fleet(plan, directory, http)
    try:
        await fleet.start()
        say("the fleet is whole")
        yield fleet, {entry.prompt: answer[0] for entry, answer in zip(asked, answers, strict=True)}
    finally:
        await fleet.close()


async def table(
    arguments: argparse.Namespace, directory: Path, http: httpx.AsyncClient, keep: Callable[[list[Cell]], None]
) -> tuple[list[Cell], list[str]]:
    """All cells asked for, on one fleet, and what its processes did unasked; `keep` gets the cells so far."""
    plan = drill_plan(arguments.model, slots=TABLE_SLOTS)
    cells: list[Cell] = []
    async with ready_fleet(plan, stages.everything_asked(), directory, http) as (fleet, answers):
        runner = CellRunner(fleet, answers)
        for stage in arguments.stages:
            for victim in arguments.victims:
                for blow in arguments.blows:
                    cells.append(await runner.run(stage, victim, blow))
                    say(cell_line(cells[-1]))
                    keep(cells)
        return cells, fleet.complaints()


async def under_load(
    arguments: argparse.Namespace, directory: Path, http: httpx.AsyncClient, keep: Callable[[GapDrill], None]
) -> tuple[GapDrill, list[str]]:
    """All troubles in turn, `--times` rounds, the load undisturbed in each round too, and what the fleet's processes did
    unasked; `keep` gets the figures so far."""
    plan = drill_plan(arguments.model, slots=GAP_SLOTS, pages=GAP_PAGES, cores=arguments.cores)
    async with ready_fleet(plan, gaps.everything_asked(), directory, http) as (fleet, answers):
        drill = GapDrill(fleet, answers)
        for number in range(arguments.times):
            for role in arguments.roles:
                await drill.undisturbed(role)
                for trouble in arguments.troubles:
                    await drill.strike(role, trouble)
            keep(drill)
            say(f"round {number + 1} of {arguments.times}\n{gap_table(drill.as_json())}")
        return drill, fleet.complaints()


async def over_hosts(
    arguments: argparse.Namespace, directory: Path, http: httpx.AsyncClient, keep: Callable[[HostDrill], None]
) -> HostDrill:
    """All cuts asked for, on one fleet; `keep` gets what was found so far."""
    plan = FleetPlan(model=arguments.model, sizes=HOST_SIZES, transfer_backend=arguments.kv_transfer_backend)
    network = Network((*cuts.HOSTS, cuts.STRANGER))
    try:
        fleet = HostFleet(plan, network, directory, http)
        try:
            await fleet.start()
            say("the fleet is whole, each process on a host of its own")
            drill = HostDrill(fleet, network, Clients(lambda _: fleet.router, http), long_questions(arguments.streams))
            await drill.undisturbed()
            say(f"{arguments.streams} answers, undisturbed; slowest {drill.calm_s:.1f} s")
            for cut in arguments.cuts:
                say(cut_line(await drill.strike(cut, arguments.hold_s)))
                keep(drill)
            await drill.at_rest()
        finally:
            await fleet.close()
    finally:
        network.close()
    return drill


def parts(wanted: str) -> tuple[str, ...]:
    """What to run. Where hosts are asked for and can be made, this process starts anew, on a network of its own. Raises
    NoNetwork where they cannot, unless other parts are asked for, too."""
    names = PARTS if wanted == "all" else (wanted,)
    if "hosts" not in names or INSIDE in os.environ:
        return names
    try:
        command = way_in()
    except NoNetwork as error:
        if wanted == "hosts":
            raise
        say(f"without part hosts: {error}")
        return tuple(name for name in names if name != "hosts")
    sys.stdout.flush()
    os.environ[INSIDE] = "1"
    os.execvp(command[0], [*command, sys.executable, *sys.orig_argv[1:]])


async def run(arguments: argparse.Namespace, wanted: tuple[str, ...], directory: Path) -> bool:
    """Everything asked for; whether all is as it must be."""
    found: dict[str, Any] = {"commit": commit(), "model": arguments.model, "machine": load()}
    say(machine_line(found["machine"]))
    fine = True

    def keep(name: str, rows: list[dict[str, Any]]) -> None:
        found[name] = rows
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1))

    async with httpx.AsyncClient(trust_env=False) as http:
        if "table" in wanted:
            cells, unasked = await table(
                arguments, directory, http, lambda so_far: keep("cells", [cell.as_json() for cell in so_far])
            )
            print("\n".join([cell_table(cells), *unasked]), flush=True)
            fine = all(cell.ok for cell in cells) and not unasked
        if "gaps" in wanted:
            drill, unasked = await under_load(arguments, directory, http, lambda so_far: keep("gaps", so_far.as_json()))
            print("\n".join(unasked), flush=True)
            fine = fine and drill.is_fine and not unasked
        if "hosts" in wanted:
            host_drill = await over_hosts(
                arguments, directory, http, lambda so_far: keep("hosts", [outcome.as_json() for outcome in so_far.outcomes])
            )
            print(cut_table(host_drill.outcomes, host_drill.left, host_drill.calm_s), flush=True)
            fine = fine and host_drill.is_fine
    found["machine_at_end"] = await asyncio.to_thread(load)
    say(machine_line(found["machine_at_end"]))
    return fine


def main() -> int:
    """Returns the exit status."""
    arguments = parse()
    try:
        wanted = parts(arguments.part)
    except NoNetwork as error:
        print(f"drills.py --part hosts: {error}", file=sys.stderr)
        return 2
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="drills-"))
    directory.mkdir(parents=True, exist_ok=True)
    say(f"logs in {directory}")
    return 0 if asyncio.run(run(arguments, wanted, directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
