"""Drills are asked for by two variables and dealt evenly."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from jdisagg.core.drill import Drill, drill_of
from jdisagg.core.errors import ConfigError

FAULTS = "corrupt:0.02,late:0.04,seed:7"


def test_faults_without_the_hooks_variable_are_no_faults() -> None:
    assert drill_of({"JDISAGG_TEST_FAULTS": FAULTS}) == Drill()
    assert drill_of({"JDISAGG_TEST_HOOKS": "0", "JDISAGG_TEST_FAULTS": FAULTS}) == Drill()
    assert drill_of({"JDISAGG_TEST_HOOKS": "1"}) == Drill()


def test_what_is_asked_for_is_read() -> None:
    drill = drill_of({"JDISAGG_TEST_HOOKS": "1", "JDISAGG_TEST_FAULTS": FAULTS})
    assert drill == Drill(rates={"corrupt": 0.02, "late": 0.04}, seed=7)
    assert drill.has("late")
    assert not drill.has("truncate")


@pytest.mark.parametrize("part", ["corrupt", "corrupt:2", "corrupt:x", "corupt:0.1", "seed:-1", ":"])
def test_a_fault_nobody_makes_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="JDISAGG_TEST_FAULTS: got '" + part):
        drill_of({"JDISAGG_TEST_HOOKS": "1", "JDISAGG_TEST_FAULTS": f"late:0.1,{part}"})


def test_each_deck_holds_exactly_its_share_in_an_order_that_the_seed_decides() -> None:
    drill = Drill(rates={"corrupt": 0.02, "late": 0.04, "truncate": 0.1}, seed=1)
    assert drill.plan("slow", "missing") is None
    plan = drill.plan("corrupt", "late")
    assert plan is not None
    first, second = (list(islice(plan, 50)) for _ in range(2))
    assert Counter(first) == Counter(second) == {None: 47, "corrupt": 1, "late": 2}
    assert first != second
    assert list(islice(drill.plan("corrupt", "late") or (), 50)) == first


def test_threads_share_one_deck() -> None:
    plan = Drill(rates={"corrupt": 0.01}).plan("corrupt")
    assert plan is not None
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            dealt = [card for part in threads.map(lambda _: list(islice(plan, 2000)), range(4)) for card in part]
    finally:
        sys.setswitchinterval(interval_s)
    assert Counter(dealt) == {None: 7920, "corrupt": 80}
