"""Checks and measures on a real accelerator, in about 9 minutes at most and without a network.

    gpu_check.py --out DIR [--sections a,b] [--patience X] [--allow-cpu] [--allow-missing] [--small]

Every section is a process with a time limit of its own; `--list` says what they show. DIR gets gpu_check.json, gpu_check.md
and the logs. Exit status: 0 when every section passed, 1 when one failed, 3 on a machine without an accelerator (without
--allow-cpu, which also makes everything small), 4 when one did not run for want of packages (without --allow-missing) or time.
What a section cannot import is named, and the others run. SIGTERM ends it with the section under way, and writes the report.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from gpu_kit.report import make_report, shown, write_report
from gpu_kit.runner import OVER, Budget, Result, cut_off, lacking, run_section
from gpu_kit.sections import SECTIONS, TOTAL_S, Section, picked

CPU_PATIENCE = 10.0  # times every budget with --allow-cpu
EXIT_FAILED, EXIT_NO_ACCELERATOR, EXIT_INCOMPLETE = 1, 3, 4
EXIT_SIGNAL = 128  # and its number


def main() -> int:
    """Returns the exit status."""
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, _end)
    options = parse()
    sections = options.picked
    if options.list:
        print("\n".join(described(section) for section in SECTIONS))
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print_missing(sections)
    small = options.small or options.allow_cpu
    patience, total_s = allowed(options)
    budget, results = Budget(total_s - (time.monotonic() - began_s), patience=patience), []
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        for section in sections:
            print(f"{section.name} (budget {section.budget_s:.0f} s): {section.says}", flush=True)
            try:
                results.append(run_section(section, out, Path(scratch), budget, small=small))
            except SystemExit:
                write_report(make_report([*results, cut_off(section, out)], small=small), out)
                raise
            print_result(results[-1])
            report = make_report(results, small=small)
            write_report(report, out)  # after each: whatever ends this run, the report is there
            if section.name == "device" and report["platform"] == "cpu" and not options.allow_cpu:
                print("no accelerator here: nothing would be shown about one (--allow-cpu runs small sizes)")
                return EXIT_NO_ACCELERATOR
    print(f"{out / 'gpu_check.md'}, {out / 'gpu_check.json'}")
    return judge(results, allow_missing=options.allow_missing)


def judge(results: list[Result], *, allow_missing: bool) -> int:
    """The exit status; prints what did not run, so that nobody takes a part for the whole."""
    missing = [result for result in results if result.lacks]
    late = [result for result in results if result.reason == OVER]
    if missing:
        packages = ", ".join(dict.fromkeys(name for result in missing for name in result.lacks))
        print(f"DID NOT RUN: {', '.join(result.name for result in missing)}; not installed: {packages}")
    if late:
        print(f"DID NOT RUN: {', '.join(result.name for result in late)}; {OVER}")
    if any(result.status == "fail" for result in results):
        return EXIT_FAILED
    return EXIT_INCOMPLETE if late or (missing and not allow_missing) else 0


def _end(number: int, _frame: object) -> NoReturn:
    """SIGTERM, of `timeout` say: unwinding kills the section that is under way."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(EXIT_SIGNAL + number)


def parse() -> argparse.Namespace:
    """The command line; exits with a usage message when it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check"), metavar="DIR", help="default out/gpu_check")
    parser.add_argument("--sections", metavar="A,B", help="only these, what they compare with, and device")
    parser.add_argument("--allow-cpu", action="store_true", help="a machine without an accelerator is no failure; small sizes")
    parser.add_argument("--small", action="store_true", help="small sizes on an accelerator, too: does it work at all")
    parser.add_argument("--allow-missing", action="store_true", help="sections that lack packages are no failure")
    parser.add_argument("--patience", type=float, metavar="X", help="times every budget, and their sum without --total-s")
    parser.add_argument("--total-s", type=float, metavar="S", help=f"of all sections (default {TOTAL_S:.0f})")
    parser.add_argument("--list", action="store_true", help="say what the sections show and what they lack here, then end")
    options = parser.parse_args()
    if options.allow_cpu and not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        options.picked = picked(options.sections)
    except ValueError as error:
        parser.error(f"--sections: {error}")
    return options


def allowed(options: argparse.Namespace) -> tuple[float, float]:
    """(what every budget is multiplied by, seconds of all sections together)."""
    patience = options.patience or (CPU_PATIENCE if options.allow_cpu else 1.0)
    return patience, options.total_s or patience * TOTAL_S


def described(section: Section) -> str:
    """One line of --list."""
    missing = lacking(section)
    return f"{section.name:12} {section.budget_s:4.0f} s  {section.says}" + (
        f"; NOT HERE: {', '.join(missing)}" if missing else ""
    )


def print_missing(sections: list[Section]) -> None:
    """What to install, before any time is spent."""
    for name in dict.fromkeys(name for section in sections for name in lacking(section)):
        without = ", ".join(section.name for section in sections if name in lacking(section))
        print(f"not installed: {name}; skipped for it: {without}", flush=True)


def print_result(result: Result) -> None:
    """A section's lines."""
    found = result.found
    print(f"  {result.status} in {result.seconds:.1f} s of {result.limit_s:.0f} s  {result.reason[-600:]}")
    for check in found.get("checks", []):
        if not check["holds"]:
            print(f"  DOES NOT HOLD: {check['name']}: {check['detail']}")
    for name, value in found.get("facts", {}).items():
        print(f"  {name}: {shown(value)}")
    for title, rows in found.get("tables", {}).items():
        for row in rows:
            print(f"  {title}: " + ", ".join(f"{name} {shown(value)}" for name, value in row.items()))
    for part, why in found.get("left_out", {}).items():
        print(f"  left out: {part}: {why}")
    for target in found.get("targets", []):
        got = target["why"] if target["got"] is None else f"{shown(target['got'])} {target['unit']}"
        print(f"  target {target['name']}: {got}, wanted {target['wanted']}: {target['verdict']}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
