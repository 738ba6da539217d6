"""On a decode worker, who waits for a slot is not passed for ever by those who fetch their KV."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Output, Role
from tests.unit.sched.engine_fake import FakeEngine, expected, next_token, request

PROMPT = (1, 2, 3, 4, 5)


def fetch(engine: FakeEngine) -> list[str]:
    """The KV of everything that has got pages arrives at once."""
    names = []
    for reserved in engine.scheduler.take_reserved():
        first = Output(request_id=reserved.request_id, token_ids=(next_token(PROMPT),))
        engine.collect([engine.scheduler.remote_first_token(reserved.request_id, first, engine.now_s)])
        engine.device.import_tokens(reserved.page_table, PROMPT, reserved.held_tokens, reserved.num_tokens)
        engine.scheduler.kv_arrived(reserved.request_id, engine.now_s)
        names.append(reserved.request_id)
    return names


@pytest.mark.parametrize("max_bypass", [0, 3])
def test_a_prompt_computed_here_gets_a_slot_although_there_is_always_one_whose_kv_has_arrived(max_bypass: int) -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=1, max_bypass=max_bypass, caching=False)
    engine.add(request("first", PROMPT, 6), remote=True)
    engine.tick()
    fetch(engine)
    engine.tick()
    engine.add(request("here", PROMPT, 6), remote=True, is_open=False)
    engine.scheduler.compute_locally("here")
    passed: list[str] = []
    for number in range(60):
        engine.add(request(f"later-{number}", PROMPT, 6), remote=True)
        plan = engine.tick()
        if any(admit.request_id == "here" for admit in plan.admit):
            break
        passed += fetch(engine)
    else:
        pytest.fail("it never got the slot")
    assert len(passed) == max_bypass
    assert all(engine.seen[name].tokens == expected(PROMPT, 1) for name in passed)  # they wait for the slot behind it
    for name in [f"later-{number}" for number in range(60)]:
        engine.scheduler.cancel(name)
    engine.run()
    assert engine.seen["here"].tokens == expected(PROMPT, 6)


def test_a_later_one_whose_kv_has_arrived_goes_first_when_the_earlier_does_not_fit() -> None:
    engine = FakeEngine(Role.DECODE, max_num_seqs=1, num_pages=9, caching=False)
    engine.add(request("first", PROMPT, 3), remote=True)
    engine.add(request("second", PROMPT, 3), remote=True)
    engine.tick()
    fetch(engine)
    engine.tick()
    long = tuple(range(1, 31))  # the whole pool
    engine.add(request("long", long, 1))
    engine.add(request("third", PROMPT, 3), remote=True)
    for _ in range(40):
        engine.tick()
        fetch(engine)
    engine.run()
    assert engine.seen["long"].tokens == expected(long, 1)
    ends = [name for name, seen in engine.seen.items() if seen.last.finish is not None]
    assert ends.index("second") < ends.index("long")
