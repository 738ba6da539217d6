"""What a section finds, on disk after every line: a section that is killed for its time keeps what it had."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MET, MISSED, NOT_RUN = "met", "missed", "not run"


class Skipped(Exception):
    """The section cannot run here; says why."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that is wanted of a section; a slow machine may miss it."""

    name: str
    wanted: float
    unit: str
    at_least: bool = True

    def line(self, got: float | None, why: str = "") -> dict[str, Any]:
        """What the report says of it; `got` None = not run, and `why`."""
        holds = got is not None and (got >= self.wanted if self.at_least else got <= self.wanted)
        asked = f"{'at least' if self.at_least else 'at most'} {self.wanted:g} {self.unit}"
        verdict = NOT_RUN if got is None else MET if holds else MISSED
        return {"name": self.name, "got": got, "unit": self.unit, "wanted": asked, "verdict": verdict, "why": why}


class Findings:
    """Facts, checks (which must hold), targets (which a slow machine may miss), tables, and parts left out by name."""

    def __init__(self, path: Path) -> None:
        """Everything is written to `path` as it is found."""
        self._path = path
        self._found: dict[str, Any] = {"facts": {}, "checks": [], "targets": [], "tables": {}, "left_out": {}}

    def fact(self, **values: Any) -> None:
        """Figures and names."""
        self._found["facts"] |= values
        self._write()

    def check(self, name: str, holds: bool, detail: str = "") -> None:
        """One that does not hold fails the section."""
        self._found["checks"].append({"name": name, "holds": bool(holds), "detail": detail})
        self._write()

    def row(self, table: str, **cells: Any) -> None:
        """One line of a table."""
        self._found["tables"].setdefault(table, []).append(cells)
        self._write()

    def target(self, target: Target, got: float | None, why: str = "") -> None:
        """A figure beside what was wanted of it; `got` None = not run, and `why`."""
        self._found["targets"].append(target.line(got, why))
        self._write()

    def left_out(self, part: str, why: str) -> None:
        """A part that did not run here."""
        self._found["left_out"][part] = why
        self._write()

    def attempt(self, part: str, run: Callable[[], None]) -> None:
        """Run one part; when it raises, the section fails but goes on."""
        try:
            run()
        except Skipped as reason:
            self.left_out(part, str(reason))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this part's result
            self.check(part, False, f"{type(error).__name__}: {str(error)[:800]}")

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._found))
        new.replace(self._path)


class Clock:
    """How much of a section's time is left."""

    def __init__(self, limit_s: float) -> None:
        self._ends_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._ends_s - time.monotonic())

    def at_most(self, seconds: float) -> float:
        """So long a wait, or what is left."""
        return min(seconds, self.left_s())
