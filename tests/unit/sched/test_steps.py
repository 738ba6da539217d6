"""A draft becomes a plan; taking a row back leaves no trace of it; results are taken once."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.requests import SamplingParams
from jdisagg.sched.plan import Admit, HostCopy, PageAppend, PageCopy, Plan, PrefillChunk, Sampled, StepResult
from jdisagg.sched.steps import Draft, Row, StepsInFlight
from tests.unit.sched.engine_fake import FakeEngine, request
from tests.unit.sched.test_sequence import sequence

ADMIT = Admit(
    slot=0,
    request_id="a",
    choice=0,
    sampling=SamplingParams(),
    stop_ids=(),
    page_table=((1,),),
    prompt_token_ids=(1,),
    generated_token_ids=(),
    decodes=False,
)
CHUNK = PrefillChunk(slot=1, request_id="b", start=4, token_ids=(5, 6, 7), samples=False)
COPY = HostCopy(key="c", page_table=((3,),), num_tokens=2)


def test_a_plan_has_all_that_was_drafted() -> None:
    draft = Draft(budget=9, reads=50.0, num_steps=3)
    draft.admit.append(ADMIT)
    draft.appends.append(PageAppend(slot=2, index=1, page=7))
    draft.prefill.append(CHUNK)
    draft.decode.append(2)
    draft.copies.append(PageCopy(source=1, target=2))
    draft.offload.append(COPY)
    draft.restore.append(replace(COPY, key="d"))
    assert draft.freeze(8, (4, 5), 2, ("e",)) == Plan(
        step_id=8,
        evict=(4, 5),
        admit=(ADMIT,),
        pages=(PageAppend(slot=2, index=1, page=7),),
        prefill=(CHUNK,),
        decode=(2,),
        num_lookahead=2,
        num_steps=3,
        copies=(PageCopy(source=1, target=2),),
        offload=(COPY,),
        restore=(replace(COPY, key="d"),),
        forget=("e",),
    )


def test_taking_a_row_back_returns_its_budgets_and_touches_no_other() -> None:
    draft = Draft(budget=10, reads=100.0)
    decoding, filling, outside = sequence(), sequence(), sequence()
    decoding.slot, filling.slot = 0, 1
    before = replace(draft)
    for slot, taken, reads in ((0, decoding, 12), (1, filling, 7)):
        draft.rows[slot] = Row(taken, 0, reads, 1)
        draft.reads -= reads
        draft.appends.append(PageAppend(slot=slot, index=3, page=slot + 5))
    draft.decode.append(0)
    draft.prefill.append(CHUNK)
    draft.budget -= 1 + len(CHUNK.token_ids)

    draft.undo(outside)  # no slot, no row
    assert (draft.budget, draft.reads, set(draft.rows)) == (6, 81.0, {0, 1})
    draft.undo(decoding)
    assert (draft.budget, draft.reads, set(draft.rows)) == (7, 93.0, {1})
    assert (draft.decode, draft.prefill) == ([], [CHUNK])
    assert [append.slot for append in draft.appends] == [1]
    draft.undo(decoding)  # its row is gone
    assert (draft.budget, draft.reads) == (7, 93.0)
    draft.undo(filling)
    assert (draft.budget, draft.reads, draft.rows) == (before.budget, before.reads, {})
    assert (draft.decode, draft.prefill, draft.appends) == ([], [], [])


def test_results_of_a_step_come_once_and_unknown_ones_change_nothing() -> None:
    steps = StepsInFlight()
    rows = {0: Row(sequence(), 0, 3, 1)}
    steps.start(Plan(step_id=0), {})  # empty: never dispatched
    assert (len(steps), steps.next_id) == (0, 0)
    steps.start(Plan(step_id=0, decode=(0,)), rows)
    assert (len(steps), steps.next_id) == (1, 1)
    assert steps.finish(0) is rows
    assert steps.finish(0) == {}
    assert (len(steps), steps.next_id) == (0, 1)


def test_a_result_nobody_waits_for_is_dropped() -> None:
    engine = FakeEngine()
    engine.add(request("a", (1, 2)))
    stray = StepResult(step_id=77, sampled=(Sampled(slot=0, token_ids=(9,)),))
    assert engine.scheduler.commit(stray) == []
    engine.run()
    assert 9 not in engine.seen["a"].tokens[:1]


def test_kv_of_one_that_fails_is_told_while_its_result_still_counts() -> None:
    engine = FakeEngine(max_num_batched_tokens=6, delay=0)
    engine.add(request("a", tuple(range(1, 10)), 5))
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    bad, good = Sampled(slot=0, token_ids=(9,), bad="NaN"), Sampled(slot=0, token_ids=(9,))
    assert scheduler.kv_of_failed(1, bad) == (((1, 2, 3),), 9)
    assert scheduler.kv_of_failed(1, good) is None
    assert scheduler.kv_of_failed(1, replace(bad, slot=1)) is None
    assert scheduler.kv_of_failed(2, bad) is None
    engine.commit_one()
    assert scheduler.kv_of_failed(0, bad) is None
    scheduler.cancel("a")
    assert scheduler.kv_of_failed(1, bad) is None
    engine.run()
