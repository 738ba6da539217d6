"""Two growing texts side by side: redrawn in place on a terminal, line by line elsewhere."""

from __future__ import annotations

import threading
from itertools import zip_longest
from typing import TextIO

ROWS = 16  # drawn on a terminal; longer texts scroll
NARROWEST = 24  # columns of a pane


class Pane:
    """One text with marks between its lines. `add` and `mark` may be called from any thread."""

    def __init__(self, title: str, width: int) -> None:
        self.title = title
        self._width = width
        self._rows = [""]
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Append text; it is wrapped at the width."""
        with self._lock:
            for char in text:
                if char == "\n" or len(self._rows[-1]) == self._width:
                    self._rows.append("")
                if char != "\n":
                    self._rows[-1] += char

    def mark(self, words: str) -> None:
        """A line across the pane; the text goes on below, where it was."""
        with self._lock:
            indent = len(self._rows[-1])
            self._rows += [f"== {words} ".ljust(self._width, "="), " " * (indent % self._width)]

    def rows(self) -> list[str]:
        """All rows; the last one may still grow."""
        with self._lock:
            return list(self._rows)


class Panes:
    """Panes of equal width, drawn to `out`."""

    def __init__(self, titles: tuple[str, ...], columns: int, out: TextIO) -> None:
        """`columns`: of the whole drawing; a narrow terminal wraps lines."""
        self._width = max(NARROWEST, (columns - 1 - 3 * (len(titles) - 1)) // len(titles))
        self.panes = [Pane(title, self._width) for title in titles]
        self._out = out
        self._in_place = out.isatty()
        self._num_drawn = 0
        self._line([pane.title for pane in self.panes])
        self._line(["-" * self._width] * len(titles))

    def show(self) -> None:
        """Draw what is new."""
        rows = [pane.rows() for pane in self.panes]
        if self._in_place:
            self._out.write(f"\x1b[{self._num_drawn}A" if self._num_drawn else "")
            shown = [list(pane[-ROWS:]) + [""] * (ROWS - len(pane)) for pane in rows]
            self._num_drawn = ROWS
            self._lines(shown)
        else:
            whole = min(len(pane) for pane in rows) - 1  # rows that will not grow, on every side
            self._lines([pane[self._num_drawn : whole] for pane in rows])
            self._num_drawn = max(self._num_drawn, whole)
        self._out.flush()

    def close(self) -> None:
        """Draw the rest, and an empty line."""
        if not self._in_place:
            self._lines([pane.rows()[self._num_drawn :] for pane in self.panes])
        self._out.write("\n")

    def _lines(self, columns: list[list[str]]) -> None:
        for cells in zip_longest(*columns, fillvalue=""):
            self._line(list(cells))

    def _line(self, cells: list[str]) -> None:
        text = " | ".join(cell.ljust(self._width) for cell in cells).rstrip()
        self._out.write(f"\x1b[K{text}\n" if self._in_place else f"{text}\n")
