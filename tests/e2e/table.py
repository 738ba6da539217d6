"""A table of cases, printed at the end of a module for people who run it with `-s`."""

from __future__ import annotations


class Table:
    """Rows for people who read the output of `-s`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, float, str]] = []

    def add(self, case: str, status: object, seconds: float, message: str) -> None:
        self._rows.append((case, str(status), seconds, message))

    def __str__(self) -> str:
        return "\n" + "\n".join(
            f"{case:34} {status:>18} {seconds:5.2f} s  {text}" for case, status, seconds, text in self._rows
        )
