"""Runs a parsed command: prints tables, writes JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jdisagg.aot.check import Question, check
from jdisagg.aot.command import Command
from jdisagg.aot.gates import render_gates, run_gates
from jdisagg.aot.table import render
from jdisagg.core.errors import ConfigError

EXIT_YES, EXIT_NO = 0, 1


def run(command: Command) -> int:
    """Returns the exit status. Raises ConfigError for what cannot be answered."""
    if command.config is None or command.topology is None:
        return _run_gates(command)
    report = check(Question(config=command.config, topology=command.topology, effort=command.effort, progress=_say))
    sys.stdout.write(render(report, explain=command.explain))
    if command.json is not None:
        _write(command.json, {"fits": report.fits, **asdict(report)})
    return EXIT_YES if report.fits else EXIT_NO


def _run_gates(command: Command) -> int:
    gates = run_gates(command.gates or "steps", command.topology, _say)
    sys.stdout.write(render_gates(gates))
    passed = not any(gate.failures for gate in gates)
    if command.json is not None:
        _write(command.json, {"passed": passed, "gates": [asdict(gate) for gate in gates]})
    return EXIT_YES if passed else EXIT_NO


def _write(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}; name another file") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
