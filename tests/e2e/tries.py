"""Again, where the machine and not what is tested may have spoilt it: each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def fair(attempt: Callable[[int], T], spoilt: Callable[[T], object], because: str, *, tries: int = 3) -> T:
    """What `attempt(number)` gives the first time that `spoilt` finds nothing, or the last time: who asserts on it says what is
    wrong. Numbers begin at 1.

    `because`: what a machine that stands still does here; printed with what was found, so that a log tells how often it does.
    """
    for number in range(1, tries):
        got = attempt(number)
        if not (found := spoilt(got)):
            return got
        print(f"try {number} of {tries} is not counted: {found}; {because}")
    return attempt(tries)
