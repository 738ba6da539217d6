"""Breaks a real fleet in every way there is, under load, and says whether anybody noticed.

    chaos.py --seed 1 --requests 150                 all faults, exact numerics, the demo model
    chaos.py --requests 10000 --json out/chaos.json  the long run
    chaos.py --inject checksums-off                  must end red: shows that the harness can see
    chaos.py --beside ../v1                          half the fleet from that checkout, other halves after each restart
    chaos.py --worker-flags="--kv-cache-dtype int8" --decode-flags="--num-scheduler-steps 4" --transformers 0

Exit status 0: no token was wrong, lost or duplicated, nothing hung, leaked, died by itself or left a traceback in a log, KV did
come from P, and of the requests that clients did not give up 99.5 % ended well (in a short run: all but one). Logs of all
processes are in --directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos_kit.fleet import SIZES, FleetPlan
from chaos_kit.kinds import ALL
from chaos_kit.session import INJECTIONS, Options, Session
from chaos_kit.verdict import Verdict

DEMO = Path(__file__).resolve().parent.parent / "jdisagg" / "demo"
REQUESTS_PER_ROUND = 100  # each scripted kind once; five of six fall in the middle of a transfer


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one run each, on the same fleet")
    parser.add_argument("--requests", type=int, default=150, help="per seed")
    parser.add_argument("--rounds", type=int, help=f"of the scripted faults; default: one per {REQUESTS_PER_ROUND} requests")
    parser.add_argument("--p", type=int, default=2, help="prefill workers")
    parser.add_argument("--d", type=int, default=2, help="decode workers")
    parser.add_argument("--model", default=str(DEMO), help="a directory; default: the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--numerics", default="exact", choices=("exact", "fast"))
    parser.add_argument(
        "--prefill-tp", type=int, default=1, help="devices of each prefill worker; unlike a decode worker's one, `fast` alone"
    )
    parser.add_argument("--local-prefill", default="on-failure")
    parser.add_argument(
        "--kv-transfer-backend", default="grpc", help="auto: shared memory here, then tcp, which pass no forwarder, then grpc"
    )
    parser.add_argument("--worker-flags", default="", help="of whoever has a model, the reference too")
    parser.add_argument("--decode-flags", default="")
    parser.add_argument("--beside", type=Path, help="a checkout of another version: every second process is of that")
    parser.add_argument("--faults", default=",".join(ALL), help="comma-separated; default: all of %(default)s")
    parser.add_argument("--catalogue", type=int, default=60, help="different questions")
    parser.add_argument("--transformers", type=int, default=50, help="greedy answers that transformers judges, if installed")
    parser.add_argument("--at-once", type=int, default=12, help="requests in flight")
    parser.add_argument(
        "--inject", nargs="+", choices=INJECTIONS, default=[], help="safeguards to switch off; the run must end red"
    )
    parser.add_argument("--json", type=Path, help="write the verdicts here")
    parser.add_argument("--directory", type=Path, help="of the logs; default: a new temporary one")
    options = parser.parse_args()
    unknown = set(filter(None, options.faults.split(","))) - set(ALL)
    if unknown:
        parser.error(f"--faults: got {', '.join(sorted(unknown))}, wanted some of {', '.join(ALL)}")
    if options.beside is not None and not (options.beside / "jdisagg" / "serve").is_dir():
        parser.error(f"--beside: {options.beside} is no checkout: it has no jdisagg/serve")
    if options.prefill_tp != 1 and options.numerics == "exact":
        parser.error("--prefill-tp: sums over two devices are rounded otherwise than over one; add --numerics fast")
    return options


def say(text: str) -> None:
    """A progress line."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def run(arguments: argparse.Namespace, directory: Path) -> list[Verdict]:
    """All seeds on one fleet."""
    unsummed = ("--no-checksums",) if "checksums-off" in arguments.inject else ()
    plan = FleetPlan(
        model=arguments.model,
        num_prefill=arguments.p,
        num_decode=arguments.d,
        dtype=arguments.dtype,
        numerics=arguments.numerics,
        local_prefill=arguments.local_prefill,
        transfer_backend=arguments.kv_transfer_backend,
        seed=arguments.seed[0],
        sizes=(*SIZES, *shlex.split(arguments.worker_flags)),
        prefill_flags=("--tensor-parallel-size", str(arguments.prefill_tp), *unsummed),
        decode_flags=(*shlex.split(arguments.decode_flags), *unsummed),
        beside=arguments.beside and arguments.beside.resolve(),
        scarce=True,
    )
    options = Options(
        plan=plan,
        faults=frozenset(filter(None, arguments.faults.split(","))),
        catalogue_size=arguments.catalogue,
        transformers=arguments.transformers,
        at_once=arguments.at_once,
        injections=frozenset(arguments.inject),
    )
    rounds = arguments.rounds or max(1, arguments.requests // REQUESTS_PER_ROUND)
    session, verdicts = Session(options, directory, say), []
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await session.start()
        for seed in arguments.seed:
            verdict = await session.run(seed, arguments.requests, rounds)
            verdicts.append(verdict)
            print(verdict.text(), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([one.as_json() for one in verdicts], indent=1))
    finally:
        await session.close()
    return verdicts


def main() -> int:
    """Returns the exit status."""
    arguments = parse()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    say(f"logs in {directory}")
    try:
        verdicts = asyncio.run(run(arguments, directory))
    except RuntimeError as error:
        say(f"could not begin: {error}")
        return 2
    return 1 if any(verdict.complaints() for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
