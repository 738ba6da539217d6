"""Figures of the gap drill."""

from chaos_kit.gaps import spread


def test_of_fifty_waits_the_longest_is_p99_and_of_two_hundred_it_is_not() -> None:
    assert spread([0.7] * 49 + [2.3]) == {"p50": 700.0, "p99": 2300.0, "max": 2300.0, "count": 50}
    assert spread([0.7] * 199 + [2.3]) == {"p50": 700.0, "p99": 700.0, "max": 2300.0, "count": 200}
