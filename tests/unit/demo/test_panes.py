"""Two texts side by side, on a terminal and elsewhere."""

from __future__ import annotations

import io

from panes import ROWS, Pane, Panes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_text_is_wrapped_and_a_mark_is_a_line_of_its_own() -> None:
    pane = Pane("p", 10)
    pane.add("abc\n0123456789xy")
    pane.mark("kill")
    pane.add("z\n")
    assert pane.rows() == ["abc", "0123456789", "xy", "== kill ==", "  z", ""]


def test_a_mark_behind_a_full_row_does_not_break_the_next_one() -> None:
    pane = Pane("p", 10)
    pane.add("0123456789")
    pane.mark("m")
    pane.add("x")
    assert pane.rows() == ["0123456789", "== m =====", "x"]


def test_without_a_terminal_every_row_is_printed_once_in_order_and_fits_80_columns() -> None:
    out = io.StringIO()
    panes = Panes(("one", "two"), 80, out)
    texts = ["".join(f"line {number} of {name}\n" for number in range(30)) for name in ("left", "the right one " * 9)]
    for begin in range(0, 3000, 7):
        for pane, text in zip(panes.panes, texts, strict=True):
            pane.add(text[begin : begin + 7])
        panes.show()
    panes.close()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["one", "|", "two"]
    rows = [line.partition(" | ") for line in lines[2:-1]]
    assert "".join(left for left, _, _ in rows).split() == texts[0].split()
    assert [left.strip() for left, _, _ in rows][:30] == texts[0].splitlines()


def test_a_terminal_is_redrawn_in_place_and_shows_the_end() -> None:
    out = Terminal()
    panes = Panes(("one", "two"), 80, out)
    panes.panes[0].add("\n".join(f"row {number}" for number in range(100)))
    panes.show()
    panes.show()
    drawn = out.getvalue()
    assert drawn.count(f"\x1b[{ROWS}A") == 1
    assert "row 99 " in drawn
    assert "row 50 " not in drawn
