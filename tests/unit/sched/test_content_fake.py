"""The fake device notices what a real one would compute wrong tokens from."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import SamplingParams
from jdisagg.sched.plan import Admit, HostCopy, PageCopy, Plan, PrefillChunk
from tests.unit.sched.content_fake import FakePages, chain
from tests.unit.sched.device_fake import FakeDevice

PROMPT = (5, 6, 7, 8, 9)


def admit(slot: int, pages: tuple[int, ...], prompt: tuple[int, ...] = PROMPT, *, decodes: bool = False) -> Admit:
    return Admit(
        slot=slot, request_id=f"r{slot}", choice=0, sampling=SamplingParams(max_tokens=4), stop_ids=(0,),
        page_table=(pages,), prompt_token_ids=prompt, generated_token_ids=(), decodes=decodes,
    )  # fmt: skip


def chunk(slot: int, start: int, tokens: tuple[int, ...], *, samples: bool = True) -> PrefillChunk:
    return PrefillChunk(slot=slot, request_id=f"r{slot}", start=start, token_ids=tokens, samples=samples)


def device(*plans: Plan) -> FakeDevice:
    made = FakeDevice(10, 4)
    for plan in (Plan(step_id=0, admit=(admit(0, (1, 2)),), prefill=(chunk(0, 0, PROMPT),)), *plans):
        made.dispatch(plan)
    return made


def test_the_next_token_is_the_sum_of_what_is_read() -> None:
    made = device()
    result = made.dispatch(Plan(step_id=1, decode=(0,)))
    assert [sampled.token_ids for sampled in result.sampled] == [((5 + 6 + 7 + 8 + 9 + 35 % 31) % 31,)]
    assert made.read((1, 2), 6) == [*PROMPT, 35 % 31]


def test_equal_tokens_elsewhere_are_other_numbers() -> None:
    one, behind_another, of_a_tenant = chain((1, 2)), chain((3, 2)), chain((1, 2), "tenant")
    assert one[1].token == behind_another[1].token
    assert one[1] != behind_another[1]
    assert one[0] != of_a_tenant[0]
    assert one == chain((1, 2, 3))[:2]


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (Plan(step_id=1, admit=(admit(1, (1, 3), (5, 6, 7, 9, 9), decodes=True),), decode=(1,)), "foreign or stale"),
        (Plan(step_id=1, admit=(admit(1, (1, 3), (5, 6, 7, 8, 9, 1), decodes=True),), decode=(1,)), "nobody wrote"),
        (Plan(step_id=1, admit=(admit(1, (1, 2), decodes=True),), decode=(0, 1)), "write page 2 in one step"),
        (Plan(step_id=1, admit=(admit(1, (1, 0), decodes=True),), decode=(1,)), "null page"),
        (Plan(step_id=1, copies=(PageCopy(source=1, target=3), PageCopy(source=3, target=4))), "from and to"),
        (Plan(step_id=1, copies=(PageCopy(source=1, target=3), PageCopy(source=2, target=3))), "to one"),
        (Plan(step_id=1, offload=(HostCopy(key="r0", page_table=((1, 3),), num_tokens=5),)), "nobody wrote"),
        (Plan(step_id=1, offload=(HostCopy(key="r0", page_table=((1, 1),), num_tokens=5),)), "two sequences"),
        (Plan(step_id=1, prefill=(chunk(0, 4, (8,)),)), "other tokens"),
    ],
)
def test_a_read_of_anything_else_raises(plan: Plan, what: str) -> None:
    made = device()
    with pytest.raises(AssertionError, match=what):
        made.dispatch(plan)


def test_pages_are_copied_before_host_copies_are_read_and_those_restored_after_that() -> None:
    """The order of the real engine: page copies, offload, restore, rows."""
    made = device()
    made.dispatch(
        Plan(
            step_id=1,
            offload=(HostCopy(key="r0", page_table=((1, 5),), num_tokens=5),),
            evict=(0,),
            admit=(admit(0, (3, 4), (*PROMPT, 4), decodes=True),),
            restore=(HostCopy(key="r0", page_table=((3, 4),), num_tokens=5),),
            copies=(PageCopy(source=2, target=5),),
            decode=(0,),
        )
    )
    assert made.read((1, 5), 5) == list(PROMPT)
    assert made.read((3, 4), 6) == [*PROMPT, 4]
    assert made.host == {}


def test_what_a_page_should_hold_is_said() -> None:
    pages = FakePages(4, 2)
    for cell in chain((1, 2)):
        pages.write((1,), cell)
    pages.expect((1,), chain((1, 2)), 2)
    with pytest.raises(AssertionError, match=r"page 1 holds .*token=1.*wanted .*token=7"):
        pages.expect((1,), chain((7, 2)), 2)
