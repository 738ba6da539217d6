"""Invariants are checked when nobody waits for it, and not often."""

from __future__ import annotations

from itertools import pairwise

from jdisagg.roles.idle_check import CALM_S, EVERY_S, IdleCheck


def test_a_spell_is_checked_once_and_only_when_it_lasts() -> None:
    check = IdleCheck()
    assert not check.is_due(0.0, is_idle=True)
    assert not check.is_due(CALM_S, is_idle=True), "nothing has happened"
    assert not check.is_due(2.0, is_idle=False)
    for begins_s in (3.0, 3.5, 4.0):  # lulls
        assert not check.is_due(begins_s, is_idle=True)
        assert not check.is_due(begins_s + 0.4, is_idle=False)
    assert not check.is_due(5.0, is_idle=True)
    assert not check.is_due(5.0 + CALM_S / 2, is_idle=True)
    assert check.is_due(5.0 + CALM_S, is_idle=True)
    assert not any(check.is_due(6.0 + second, is_idle=True) for second in range(200)), "once"


def test_there_is_a_minute_between_two_checks() -> None:
    check, due = IdleCheck(), list[float]()
    for tick in range(2000):  # busy for 1 s of every 5
        now_s = 0.1 * tick
        if check.is_due(now_s, is_idle=tick % 50 >= 10):
            due.append(now_s)
    assert len(due) == 4
    assert all(EVERY_S <= later - one < EVERY_S + 5.0 for one, later in pairwise(due))
