"""What a step costs, counted instead of timed (scripts/bench_scheduler.py does that): instructions, copies, comparisons."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log2
from types import FrameType
from typing import Any

import pytest

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import Role
from jdisagg.sched.plan import Sampled, StepResult
from jdisagg.sched.queue import SequenceQueue
from jdisagg.sched.scheduler import Scheduler
from jdisagg.sched.sequence import Sequence
from jdisagg.sched.states import Status
from tests.unit.sched.engine_fake import FakeEngine, request

RUNNING = 8
FEW, MANY = 100, 5000


def loaded(
    num_waiting: int,
    *,
    running: int = RUNNING,
    slots: int = 0,
    pages: int = 256,
    waiting_tokens: int = 5,
    max_bypass: int = 16,
    caching: bool = True,
) -> Scheduler:
    """`running` decoding sequences, and behind them `num_waiting` with prompts of `waiting_tokens`."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=slots or running,
            max_num_batched_tokens=512,
            reserved_decode_tokens=0,
            max_queue_len=2 * MANY,
            max_bypass=max_bypass,
        ),
        role=Role.UNIFIED,
        max_model_len=512,
        page_size=4,
        num_pages=1 + pages,
        eos_token_ids=(),
        enable_prefix_caching=caching,
    )
    for i in range(running + num_waiting):
        rest = (2, 3, 4, 5) * 4 if i < running else (6,) * (waiting_tokens - 1)
        scheduler.add(request(f"r{i}", (1 + i % 7, *rest), 64), 0.0)
    for _ in range(3):
        step(scheduler)
    assert scheduler.counts()["running"] == running
    assert scheduler.counts()["waiting"] == num_waiting
    return scheduler


def step(scheduler: Scheduler) -> None:
    """One whole turn of the loop with a runner that answers at once."""
    scheduler.expire(0.0)
    plan = scheduler.schedule(0.0)
    slots = (*(chunk.slot for chunk in plan.prefill if chunk.samples), *plan.decode)
    scheduler.commit(StepResult(step_id=plan.step_id, sampled=tuple(Sampled(slot=s, token_ids=(9,)) for s in slots)))


@dataclass
class Work:
    """What was done between two moments."""

    instructions: int = 0  # of Python byte code
    copied: int = 0  # queue entries in snapshots


@contextmanager
def counted() -> Iterator[Work]:
    """Count what the body does. What C code does inside one instruction is seen for queue snapshots only."""
    work = Work()

    def on_event(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if frame.f_code is SequenceQueue.__iter__.__code__:
                work.copied += len(frame.f_locals["self"])
        work.instructions += event == "opcode"
        return on_event

    before = sys.gettrace()
    gc.disable()  # a finalizer that runs meanwhile would count; collecting first takes a second late in a whole run
    sys._getframe().f_trace_opcodes = True  # Python 3.12 sends opcodes if some frame wants them already
    sys.settrace(on_event)
    try:
        yield work
    finally:
        sys.settrace(before)
        gc.enable()


def work_of(do: Callable[[], object]) -> Work:
    """Of one call."""
    with counted() as work:
        do()
    assert work.instructions > 0
    return work


def works(scheduler: Scheduler, steps: int = 20) -> list[Work]:
    """Of every one of the next steps."""
    return [work_of(lambda: step(scheduler)) for _ in range(steps)]


@pytest.mark.covers("V45", "X19")
def test_a_step_does_the_same_work_with_5000_waiting_as_with_100() -> None:
    assert works(loaded(MANY)) == works(loaded(FEW))


@pytest.mark.parametrize("max_bypass", [0, 16])
def test_a_step_in_which_all_waiting_lack_memory_does_the_same_work_with_5000_as_with_100(max_bypass: int) -> None:
    sizes = {"running": RUNNING - 1, "slots": RUNNING, "pages": 110, "waiting_tokens": 370, "max_bypass": max_bypass}
    few, many = loaded(FEW, **sizes), loaded(MANY, **sizes)
    assert works(many) == works(few)
    assert many.counts()["waiting"] == MANY


def while_memory_is_short(num_shared: int) -> list[Work]:
    """Of steps in which prompts wait of which the first `num_shared` tokens are here, with too few pages for the rest."""
    shared = tuple(range(10, 10 + num_shared))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, reserved_decode_tokens=0),
        role=Role.UNIFIED, max_model_len=512, page_size=4, num_pages=1 + num_shared // 4 + 20, eos_token_ids=(),
    )  # fmt: skip
    scheduler.add(request("runs", (*shared, *(1,) * 17), 30), 0.0)
    step(scheduler)
    for number in range(8):
        scheduler.add(request(f"waits{number}", (*shared, *(2 + number,) * 70), 2), 0.0)
    found = works(scheduler)
    assert scheduler.counts()["running"] == 1
    assert scheduler.counts()["waiting"] == 8
    return found


def test_what_is_here_of_prompts_that_do_not_fit_is_not_gone_through_in_every_step() -> None:
    assert while_memory_is_short(400)[1:] == while_memory_is_short(40)[1:]


@pytest.mark.covers("V45")
def test_the_work_of_a_decode_step_grows_in_proportion_to_who_runs() -> None:
    few, many = (loaded(0, running=n, pages=17 * n) for n in (RUNNING, 8 * RUNNING))
    small, large = ([w.instructions + w.copied for w in works(s)] for s in (few, many))
    assert sum(small) < sum(large) <= 8 * sum(small)
    assert many.stats.preemptions == 0


def test_without_a_prefix_cache_a_step_is_less_work() -> None:
    """Tokens that fill no page are taken in the short way, also behind the first page."""
    plain, cached = (sum(w.instructions + w.copied for w in works(loaded(0, caching=c))) for c in (False, True))
    assert plain < cached


def while_choices_wait(n: int) -> list[Work]:
    """Of the steps in which the first of `n` choices computes the prompt of all."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, reserved_decode_tokens=0, max_queue_len=2 * n),
        role=Role.UNIFIED, max_model_len=512, page_size=4, num_pages=200, eos_token_ids=(),
    )  # fmt: skip
    for index in range(n):
        scheduler.add(request(f"r/{index}", tuple(range(1, 121)), 8, fork_group="r"), 0.0)
    done = works(scheduler, steps=12)
    assert scheduler.counts()["forking"] == n - 1, "the prompt is not done yet"
    return done


def test_a_step_does_the_same_work_however_many_choices_wait_for_their_prompt() -> None:
    assert while_choices_wait(128) == while_choices_wait(16)


def while_other_groups_wait(num_groups: int, *, forks: bool) -> list[Work]:
    """Of steps in which all slots are taken and `num_groups` of three choices wait. `forks`: one of the two that run is a
    choice, too, and its sibling, whose turn it would be, lacks memory."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, reserved_decode_tokens=60, max_queue_len=MANY),
        role=Role.UNIFIED, max_model_len=512, page_size=4, num_pages=1 + 40, eos_token_ids=(),
    )  # fmt: skip
    scheduler.add(request("runs", (7, 8, 9), 60), 0.0)
    for index in range(1 + forks):
        scheduler.add(request(f"also/{index}", tuple(range(1, 9)), 60, fork_group="also"), 0.0)
    for number in range(num_groups):
        for index in range(3):
            scheduler.add(request(f"r{number}/{index}", (number + 1, 2, 3), 8, fork_group=f"r{number}"), 0.0)
    done = works(scheduler)
    counts = scheduler.counts()
    assert (counts["running"], counts["waiting"], counts["forking"]) == (2, num_groups, 2 * num_groups + forks)
    return done


@pytest.mark.parametrize("forks", [False, True])
def test_a_step_does_the_same_work_however_many_choices_wait_for_siblings_that_wait_themselves(forks: bool) -> None:
    assert while_other_groups_wait(MANY // 10, forks=forks) == while_other_groups_wait(FEW // 10, forks=forks)


def explaining(num_waiting: int) -> Work:
    """Of saying what each one waits for, all but two of them for one that lacks pages."""
    engine = FakeEngine(num_pages=20, max_num_seqs=4, max_bypass=0, max_queue_len=num_waiting)
    engine.add(request("runs", tuple(range(16, 0, -1)), 40))
    engine.tick()
    engine.add(request("big", tuple(range(1, 62)), 2))
    engine.add(*(request(f"r{number}", (number + 1, 2), 2) for number in range(num_waiting - 1)))
    engine.tick()
    waits = [one["waits_for"] for one in engine.scheduler.snapshot()["sequences"] if one["status"] == "waiting"]
    assert len(waits) == num_waiting
    assert {wait[:18] for wait in waits[1:]} == {"behind request big"}
    return work_of(engine.scheduler.snapshot)


def test_the_work_of_saying_what_all_wait_for_grows_in_proportion_to_them() -> None:
    few, many = (work.instructions + work.copied for work in map(explaining, (16, 128)))
    assert few < many <= 8 * few


@pytest.mark.covers("X19")
def test_cancelling_one_of_5000_waiting_is_the_work_of_cancelling_one_of_100() -> None:
    few, many = loaded(FEW), loaded(MANY)
    wanted = work_of(lambda: few.cancel(f"r{RUNNING + FEW // 2}"))
    assert work_of(lambda: many.cancel(f"r{RUNNING + MANY // 2}")) == wanted
    assert many.counts()["waiting"] == MANY - 1


@dataclass
class Comparisons:
    """How many were made, by C code as well."""

    count: int = 0


def counting_sequences(num: int, seen: Comparisons) -> list[Sequence]:
    """In order of arrival. Each comparison of two orders counts; so does each entry that a search by identity passes."""

    class CountedOrder(tuple[int, int]):
        __slots__ = ()
        __hash__ = tuple.__hash__

        def __lt__(self, other: Any) -> bool:
            seen.count += 1
            return super().__lt__(other)

        def __eq__(self, other: object) -> bool:
            seen.count += 1
            return super().__eq__(other)

    class CountedSequence(Sequence):
        __slots__ = ()
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            seen.count += 1
            return self is other

    return [CountedSequence(request(f"r{i}", (1,)), CountedOrder((0, i)), Status.WAITING, 1, frozenset()) for i in range(num)]


def test_the_last_of_many_choices_to_end_compare_no_prompts() -> None:
    """Prompts are long: 64 choices of one that compare it with each other when they end together stand in everybody's way."""
    seen = Comparisons()

    class CountedPrompt(tuple[int, ...]):
        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other: object) -> bool:
            seen.count += 1
            return super().__eq__(other)

    engine = FakeEngine(max_num_seqs=64, max_num_batched_tokens=64, num_pages=400)
    for number in range(64):
        engine.add(request(f"r/{number}", CountedPrompt(range(1, 13)), 4, fork_group="r"))
    while engine.scheduler.counts()["running"] < 64:
        engine.tick()
    seen.count = 0
    engine.run()
    assert {len(one.tokens) for one in engine.seen.values()} == {4}
    assert seen.count == 0


def test_the_ids_of_a_prompt_are_looked_at_once_however_many_choices_it_has() -> None:
    looks = Comparisons()

    class CountedPrompt(tuple[int, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[int]:
            looks.count += 1
            return super().__iter__()

    engine, seen = FakeEngine(num_pages=400), list[int]()
    prompt = CountedPrompt(range(1, 13))
    for number in range(64):
        engine.add(request(f"r/{number}", prompt, 4, fork_group="r"))
        seen.append(looks.count)
    assert seen[0] > 0
    assert seen[-1] == seen[0]
    engine.add(request("s/0", CountedPrompt(range(1, 13)), 4, fork_group="r"))
    assert looks.count == 2 * seen[0], "one that is equal is looked at, too"


def test_the_garbage_collector_goes_through_no_tokens_of_a_stream() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2, 3), 30, generated=(5,)))
    for _ in range(9):
        engine.tick()
    generated = engine.scheduler.table.live["a"].generated
    assert len(generated) > 5
    assert len(gc.get_referents(generated)) <= 1, "its type"


@pytest.mark.covers("X19")
def test_removing_one_of_5000_from_a_queue_compares_a_logarithm_of_them() -> None:
    seen, queue = Comparisons(), SequenceQueue()
    sequences = counting_sequences(MANY, seen)
    for sequence in sequences:
        queue.add(sequence)
    for index in (0, MANY // 2, MANY - 1):
        seen.count = 0
        queue.remove(sequences[index])
        assert 0 < seen.count <= 2 * ceil(log2(MANY))
    assert len(queue) == MANY - 3


def test_a_burst_on_one_prefix_costs_each_arrival_the_same() -> None:
    """Requests with one system prompt wait for their peer; pinning it for each must not go through all the others."""
    engine = FakeEngine(role=Role.DECODE, num_pages=200, max_model_len=64, max_queue_len=2 * MANY)
    prompt = tuple(range(2, 42))
    engine.add(request("first", prompt, 2))
    engine.run()
    costs = []
    for number in range(MANY):
        one = request(f"r{number}", prompt, 8)
        if number in (FEW, MANY - 1):
            costs.append(work_of(lambda asked=one: engine.scheduler.add(asked, 0.0, remote=True)))
        else:
            engine.scheduler.add(one, 0.0, remote=True)
    assert costs[0] == costs[1]
    assert engine.scheduler.held_tokens(f"r{MANY - 1}") == len(prompt)
