"""Arbitrary histories of a worker: whatever comes, in whatever order, invariants hold and every stream is right.

JDISAGG_MACHINE_RULES=1000000 JDISAGG_MACHINE_SEED=1000 pytest -s tests/unit/sched/test_machine.py
"""

from __future__ import annotations

import os

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.sched.machine_peers import DecodeMachine, PrefillMachine
from tests.unit.sched.machine_rules import WorkerMachine

RULES = int(os.environ.get("JDISAGG_MACHINE_RULES", "20000"))  # of the three machines together
SEED = int(os.environ.get("JDISAGG_MACHINE_SEED", "1000"))
ROUND = settings(max_examples=max(1, min(50, RULES // 120)), stateful_step_count=50, derandomize=False, database=None)
MIN_RULES_PER_S = 40  # on a machine that does other things too


@pytest.mark.timeout(60 + RULES / MIN_RULES_PER_S)
@pytest.mark.covers("I-2")
@pytest.mark.covers("H12", "X20", "H18")
@pytest.mark.parametrize("machine", [WorkerMachine, PrefillMachine, DecodeMachine], ids=["unified", "prefill", "decode"])
def test_every_history_keeps_the_invariants(machine: type[WorkerMachine]) -> None:
    machine.num_rules, first = 0, SEED
    while machine.num_rules < RULES / 3:
        try:
            run_state_machine_as_test(seed(first)(machine), settings=ROUND)  # every rule and invariant of the machine asserts
        except AssertionError as error:
            error.add_note(f"found with JDISAGG_MACHINE_SEED={first}")
            raise
        first += 1
    print(f"{machine.__name__}: {machine.num_rules} rules, seeds {SEED} to {first - 1}")
    assert machine.num_rules >= RULES / 3
