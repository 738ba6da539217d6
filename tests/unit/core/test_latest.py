"""A table that keeps what was said last."""

from __future__ import annotations

from jdisagg.core.latest import remember


def test_the_first_of_too_many_is_forgotten_and_what_is_said_again_is_the_last() -> None:
    latest: dict[str, int] = {}
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        remember(latest, key, value, 2)
    assert list(latest.items()) == [("b", 2), ("a", 3)]
    remember(latest, "c", 4, 2)
    assert list(latest.items()) == [("a", 3), ("c", 4)]
