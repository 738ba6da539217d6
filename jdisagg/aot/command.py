"""The command line: what is asked of this tool, and the settings of `serve` that it is asked about. No jax here."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jdisagg.aot.accelerators import Topology, parse_topology
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Parser, load_config

DESCRIPTION = """Does a model fit on devices that are not here, does it compile for them, and how fast could it be?
Weights, KV pages, shardings and steps are those of `python -m jdisagg.serve` with the same flags, on abstract
arrays: no device is needed, no weights are read, nothing is allocated. Flags that are not listed here are those of
serve (--model, --config, --role, --max-num-seqs, ..); --model also takes the path of a config.json."""
EPILOG = """examples:
  python -m jdisagg.aot --model configs/models/llama3-70b.json --topology v6e:2x4 --tp 8
  python -m jdisagg.aot --config configs/llama3-8b-h200.toml --model configs/models/llama3-8b.json --topology h200
  python -m jdisagg.aot --gates --topology v6e:2x2

Exit status: 0 it fits and compiles (or every gate holds), 1 it does not, 2 a command that cannot be answered, be it
only now: the model's config.json cannot be fetched, say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is compiled."""

    compile: bool
    all_executables: bool  # instead of the largest of each kind
    all_layers: bool  # instead of two shallow models of an unrolled one


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A parsed command line."""

    topology: Topology | None  # None: --gates of every kind
    config: Config | None  # None with --gates
    explain: bool
    json: Path | None
    gates: str | None  # few | steps | all
    effort: Effort


def parse_command(argv: Sequence[str]) -> Command:
    """Raises ConfigError; exits only for `--help`."""
    args, serve_flags = build_parser().parse_known_args(list(argv))
    topology = parse_topology(args.topology) if args.topology is not None else None
    if args.gates and serve_flags:
        raise ConfigError(f"--gates: leave out {serve_flags[0]}, gates have models of their own")
    if topology is None and not args.gates:
        raise ConfigError("--topology: wanted a kind of device and how many, like v6e:2x4 or h200:1")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json: no directory {str(args.json.parent)!r}; make it first")
    if args.json is not None and args.json.is_dir():
        raise ConfigError(f"--json: {str(args.json)!r} is a directory; name a file in it")
    return Command(
        topology=topology,
        config=None if args.gates else _config(serve_flags, args.tp),
        explain=args.explain,
        json=args.json,
        gates=args.gates,
        effort=Effort(compile=args.compile, all_executables=args.all_executables, all_layers=args.all_layers),
    )


def _config(serve_flags: Sequence[str], tp: str | None) -> Config:
    """As `serve` reads them, but one engine unless a role or a file says otherwise."""
    flags = list(serve_flags)
    if not any(flag.partition("=")[0] in ("--role", "--config") for flag in flags):
        flags = ["--role", "unified", *flags]
    if tp is not None:
        flags += ["--tensor-parallel-size", tp]
    remarks = logging.getLogger("jdisagg.core.settings")  # on settings that say nothing to a role: files are for several
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        return load_config(flags)
    finally:
        remarks.setLevel(level)


def build_parser() -> argparse.ArgumentParser:
    """Of its own flags; absent ones stay for `serve`'s."""
    parser = Parser(
        prog="python -m jdisagg.aot",
        allow_abbrev=False,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--topology", metavar="KIND:SHAPE", help="v5e:2x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, h100:1, h200:1, cpu:1")
    add("--tp", metavar="N", help="short for --tensor-parallel-size")
    add("--explain", action="store_true", help="say where every figure comes from, and list what was found in the programs")
    add("--json", type=Path, metavar="FILE", help="write the whole answer as JSON, too")
    add("--no-compile", dest="compile", action="store_false", help="arithmetic only: seconds, and no compiler is needed")
    add("--all-executables", action="store_true", help="compile every bucket, not the largest of each kind")
    add("--all-layers", action="store_true", help="compile unrolled layers all, instead of two shallow models")
    add(
        "--gates",
        nargs="?",
        const="steps",
        choices=("few", "steps", "all"),
        help="compile whole steps for TPU topologies, or for --topology, and check what must hold of each (few, steps or all)",
    )
    return parser
