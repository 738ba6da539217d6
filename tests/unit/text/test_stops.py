"""Stop strings are found wherever the text was cut, and nothing of them is shown, or all of them is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jdisagg.text.stops import Stop, StopStrings


def _run(stops: list[str], pieces: list[str], *, are_shown: bool = False) -> tuple[list[str], str | None]:
    scanner = StopStrings([Stop(stop) for stop in stops], are_shown=are_shown)
    shown = [scanner.push(piece) for piece in pieces]
    return [*shown, scanner.flush()], scanner.matched


def test_a_stop_string_across_pieces_is_trimmed() -> None:
    assert _run(["END"], ["abcE", "N", "Dxyz"]) == (["abc", "", "", ""], "END")


def test_a_stop_string_that_is_shown_ends_the_text() -> None:
    assert _run(["END"], ["abcE", "N", "Dxyz", "END"], are_shown=True) == (["abc", "", "END", "", ""], "END")
    assert _run(["bc", "abc"], ["xabc"], are_shown=True) == (["xabc", ""], "abc")


def test_text_that_only_looked_like_a_stop_string_is_released() -> None:
    assert _run(["END"], ["aEN", "EN", "x"]) == (["a", "EN", "ENx", ""], None)


def test_withheld_text_is_shown_at_the_end() -> None:
    assert _run(["\n\n"], ["line\n"]) == (["line", "\n"], None)


def test_the_match_that_ends_first_wins() -> None:
    assert _run(["abcd", "bc"], ["xabcd"]) == (["xa", ""], "bc")
    assert _run(["bc", "abc"], ["xabc"]) == (["x", ""], "abc")


def test_without_stop_strings_text_passes() -> None:
    assert _run([], ["a", "b"]) == (["a", "b", ""], None)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = _run(stops, pieces)
    whole, whole_matched = _run(stops, [text])
    assert ("".join(shown), matched) == ("".join(whole), whole_matched)
    assert not any(stop in "".join(shown) for stop in stops)
    assert matched is not None or "".join(shown) == text
    with_stop, found = _run(stops, pieces, are_shown=True)
    assert ("".join(with_stop), found) == ("".join(shown) + (matched or ""), matched)


def test_a_match_counts_where_it_ends() -> None:
    scanner = StopStrings([Stop("ab"), Stop("xabc")])
    shown = [scanner.push(text, may_end=False) for text in ("xab", "ab", "a")]
    assert (shown, scanner.matched) == (["", "xabab", ""], None), "what ended before stays text"
    assert (scanner.push("b"), scanner.matched) == ("", "ab")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 20))
@example("ababa", ["aba"], 3)
@example("aabaab", ["aabaab"], 0)
def test_the_first_match_that_ends_behind_the_border_is_found(text: str, stops: list[str], border: int) -> None:
    scanner = StopStrings([Stop(stop) for stop in stops])
    shown = "".join(scanner.push(character, may_end=index >= border) for index, character in enumerate(text)) + scanner.flush()
    matches = [
        (end, end - len(stop), stop) for stop in stops for end in range(border + 1, len(text) + 1) if text[:end].endswith(stop)
    ]
    _, begin, stop = min(matches, default=(len(text), len(text), None))
    assert (shown, scanner.matched) == (text[:begin], stop)
    assert not scanner.flush(), "nothing is shown twice"


class Counted(str):
    """Counts how often one of its characters is looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> str:
        self.looked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", [2000 * "a", 40 * (49 * "a" + "c")])
def test_a_character_costs_the_same_however_much_is_withheld(text: str) -> None:
    stop = Counted(1000 * "a" + "b")
    scanner = StopStrings([Stop(stop)])
    shown = "".join(map(scanner.push, text)) + scanner.flush()
    assert shown == text
    assert stop.looked < 8 * len(text)
