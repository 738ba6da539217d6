"""Quantiles and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lies, by linear interpolation; `values` is not empty."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return quantile(values, 0.5)


def milliseconds(values: Sequence[float], share: float = 0.5) -> float:
    """A quantile of seconds, in ms."""
    return 1e3 * quantile(values, share)


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """left - right, pair by pair."""
    return [a - b for a, b in zip(left, right, strict=True)]


def gaps(times_s: Sequence[float]) -> list[float]:
    """Seconds between neighbours."""
    return differences(times_s[1:], times_s[:-1])


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
