"""On a decode worker, who waits for a slot is not passed for ever by those who fetch their KV."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import Output, Role
from tests.unit.sched.engine_fake import FakeEngine, expected, next_token, request
from tests.unit.sched.peer_fake import arrive

PROMPT = (1, 2, 3, 4, 5)


def fetch(engine: FakeEngine) -> list[str]:
    """The KV of everything that has got pages arrives at once."""
    names = []
    for reserved in engine.scheduler.take_reserved():
        first = Output(request_id=reserved.request_id, token_ids=(next_token(PROMPT),))
        engine.collect([engine.scheduler.remote_first_token(reserved.request_id, first)])
        engine.device.import_tokens(reserved.page_table, PROMPT, reserved.held_tokens, reserved.num_tokens)
        engine.scheduler.kv_arrived(reserved.request_id)
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


def test_a_prompt_takes_no_memory_before_an_earlier_one_whose_peer_has_begun() -> None:
    """All three wait for the last slot to come free: one that will fetch, one to be computed, one whose KV has arrived."""
    engine = FakeEngine(Role.DECODE, max_num_seqs=1, num_pages=11, caching=False)
    engine.add(request("first", PROMPT, 10), remote=True)
    engine.tick()
    fetch(engine)
    while engine.scheduler.num_free_pages > 6:
        engine.tick()
    long = tuple(range(1, 26))  # seven pages
    engine.add(request("long", long, 3), remote=True)
    engine.add(request("second", PROMPT, 3))
    engine.add(request("third", PROMPT, 3), remote=True)
    engine.tick()
    assert fetch(engine) == ["third"]
    while engine.scheduler.counts()["running"]:
        engine.tick()
    assert [admit.request_id for admit in engine.tick().admit] == ["third"]
    (reserved,) = engine.scheduler.take_reserved()
    assert reserved.request_id == "long"


@pytest.mark.parametrize(("tokens", "next_one"), [(14, "local"), (22, "ready")])
def test_one_whose_kv_is_in_place_takes_no_slot_before_an_earlier_prompt_behind_one_that_fetches(
    tokens: int, next_one: str
) -> None:
    """The one that fetches needs no slot. Only where it gets no memory, so that the prompt would pass it, does `ready` go."""
    engine = FakeEngine(Role.DECODE, max_num_seqs=1, num_pages=7, reserved_decode_tokens=0, caching=False, delay=0)
    engine.add(request("runs", tuple(range(1, 10)), 3))
    engine.tick()
    engine.add(request("fetches", tuple(range(1, 1 + tokens)), 2), remote=True)
    engine.add(request("local", (7,), 2))
    engine.add(request("ready", PROMPT[:3], 2), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    assert reserved.request_id == "ready"
    arrive(engine, reserved, PROMPT[:3])
    while engine.seen["runs"].last.finish is None:
        assert not engine.tick().admit
    assert [admit.request_id for admit in engine.tick().admit] == [next_one]


def test_a_prompt_takes_no_memory_before_an_earlier_choice_that_lacks_a_page() -> None:
    """All wait for the last slot: a choice whose sibling has its prompt, a prompt to be computed, one whose KV has arrived."""
    prompt = tuple(range(1, 11))
    engine = FakeEngine(Role.DECODE, max_num_seqs=2, num_pages=7, reserved_decode_tokens=5, caching=False, delay=0)
    engine.add(request("first", (7,), 4), *(request(f"r/{i}", prompt, 6, fork_group="r") for i in range(2)))
    engine.add(request("second", (8,), 1))
    engine.add(request("third", PROMPT[:3], 2), remote=True)
    engine.tick()
    (reserved,) = engine.scheduler.take_reserved()
    arrive(engine, reserved, PROMPT[:3])
    while engine.seen["first"].last.finish is None:
        assert not engine.tick().admit
    assert (engine.scheduler.counts()["forking"], engine.scheduler.num_free_pages) == (1, 1)
    assert [admit.request_id for admit in engine.tick().admit] == ["third"]
    engine.run()
    assert engine.seen["r/1"].tokens == expected(prompt, 6)
