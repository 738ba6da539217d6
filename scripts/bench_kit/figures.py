"""Statistics of a run and how they are printed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lies, by linear interpolation; `values` is not empty."""
    return float(np.quantile(values, share))


def spread(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Median, lowest and highest, times `scale`."""
    middle, low, high = (f"{scale * value:{form}}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low} to {high}]"


def milliseconds(values: Sequence[float], share: float = 0.5) -> float:
    """A quantile of seconds, in ms."""
    return 1e3 * quantile(values, share)


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """left - right, pair by pair."""
    return [a - b for a, b in zip(left, right, strict=True)]


def gaps(times_s: Sequence[float]) -> list[float]:
    """Seconds between neighbours."""
    return differences(times_s[1:], times_s[:-1])


def longest_gap(times_s: Sequence[float], since_s: float) -> float:
    """The longest between neighbours of which the later one came after `since_s`; 0 when there is none."""
    return max((b - a for a, b in itertools.pairwise(times_s) if b > since_s), default=0.0)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines: a title, the columns' names and the rows, indented; the first column is aligned left."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    shown = [title]
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        shown.append("  ".join(("  ", row[0].ljust(widths[0]), *cells[1:])))
    return shown


def met(is_met: bool) -> str:
    """How a target is judged in a table."""
    return "met" if is_met else "missed"
