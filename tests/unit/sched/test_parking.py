"""Computed prompts whose receiver has no memory give their pages to prompts that wait, and come back."""

from __future__ import annotations

from jdisagg.core.requests import Role
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, expected, request

PROMPT = tuple(range(1, 20))


def published(*names: str, **options: object) -> FakeEngine:
    """A prefill worker that has computed a prompt for each of `names`, the first with the best priority."""
    engine = FakeEngine(Role.PREFILL, caching=False, **{"num_pages": 40, **options})
    for priority, name in enumerate(names):
        engine.add(request(name, (priority + 1, *PROMPT), 5, priority=priority, generated=(7, 8)))
    while engine.scheduler.counts()["publishing"] < len(names):
        engine.tick()
    return engine


def test_of_those_named_the_last_in_order_stands_back() -> None:
    engine = published("best", "middle", "worst", scheduling_policy="priority", priority_aging_s=0.0)
    assert engine.scheduler.park(("middle", "best")) == "middle"
    assert engine.scheduler.park(("middle", "nobody")) is None, "it holds nothing any more"
    assert engine.scheduler.park(()) is None
    assert engine.scheduler.park(("best", "worst")) == "worst"
    assert engine.scheduler.stats.preemptions == 2
    assert engine.scheduler.counts()["parked"] == 2
    assert engine.scheduler.num_pages - engine.scheduler.num_free_pages == 6, "those of the best one"
    assert not any(engine.scheduler.page_table(name)[0] for name in ("middle", "worst"))


def test_it_comes_back_to_its_place_and_nobody_passes_it() -> None:
    engine = published("a", "b")
    engine.scheduler.park(("a",))
    sequence = engine.scheduler.table.live["a"]
    assert (sequence.status, sequence.wait.was_preempted, sequence.generated.tolist()) == (Status.PARKED, True, [7, 8])
    order = sequence.order
    for name in ("a", "b", "nobody"):
        engine.scheduler.unpark(name)
    assert engine.scheduler.counts()["waiting"] == 1
    assert engine.scheduler.counts()["publishing"] == 1
    assert sequence.order == order
    engine.seen.clear()
    while engine.scheduler.counts()["publishing"] < 2:
        engine.tick()
    assert engine.seen["a"].tokens == expected((1, *PROMPT, 7, 8), 1)
    for name in ("a", "b"):
        engine.scheduler.cancel(name)
    engine.run()


def test_one_that_ended_with_its_first_token_has_no_reason_to_stand_back() -> None:
    engine = FakeEngine(Role.PREFILL)
    engine.add(request("a", PROMPT, 1))
    while engine.scheduler.counts()["publishing"] == 0:
        engine.tick()
    assert engine.scheduler.park(("a",)) is None
    engine.scheduler.cancel("a")
    engine.run()


def test_a_parked_prompt_can_be_given_up() -> None:
    engine = published("a")
    engine.scheduler.park(("a",))
    engine.scheduler.cancel("a")
    engine.run()
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages


class Counted(str):
    """Counts comparisons."""

    __slots__ = ()
    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return super().__eq__(other)


def test_choosing_among_many_compares_each_of_them_a_few_times() -> None:
    """A tick of a worker with 2,000 computed prompts took 24 ms."""
    names = [str(number) for number in range(40)]
    engine = published(*names, num_pages=1 + 6 * len(names))
    Counted.count = 0
    assert engine.scheduler.park(tuple(Counted(name) for name in names)) is not None
    assert 0 < Counted.count <= 3 * len(names)
