"""What other processes say is short and printable by the time it is told."""

from __future__ import annotations

from jdisagg.core.told import MOST_CHARACTERS, MOST_NAMED, few_of, printable, told


def test_what_is_short_and_printable_stays_as_it_is() -> None:
    for text in ("", "piece [0, 4): timeout", "Gerät, 装置, 🙂", "x" * MOST_CHARACTERS):
        assert told(text) == text


def test_a_long_text_is_cut() -> None:
    assert told("x" * 20 * 2**20) == "x" * MOST_CHARACTERS + "..."
    assert told("abcdef", 3) == "abc..."


def test_of_many_the_first_few_are_named() -> None:
    few = [f"w{number}" for number in range(MOST_NAMED)]
    assert few_of([], "; ") == ""
    assert few_of(few, "; ") == "w0; w1; w2; w3"
    assert few_of([*few, "w4", "w5"], ", ") == "w0, w1, w2, w3, 2 more"


def test_what_a_terminal_would_obey_is_shown_as_an_escape() -> None:
    assert told("a\0b\x1b[31mc\r\nd\u2028\x7f") == r"a\x00b\x1b[31mc\r\nd\u2028\x7f"
    assert printable("\ud800") == r"\ud800", "half of a pair"
