"""KV from D to P: the second turn of a chat computes and sends only what is new."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.requests import SamplingParams
from jdisagg.handoff.borrower import LONGEST_S
from tests.unit.roles.network_fake import BYTES_PER_TOKEN, CHUNK_TOKENS
from tests.unit.roles.second_turn import PROMPT, first_turn, moved, provenance_of, read, serve_second_turn, since
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import expected, request

pytestmark = pytest.mark.usefixtures("no_sleep")


def test_second_turn_moves_and_computes_exactly_what_is_missing() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    held = (len(PROMPT) + 14 - 1) // 4 * 4  # full pages at D
    cached = len(PROMPT) // 4 * 4  # full pages at P
    missing = len(prompt) - held
    assert serve_second_turn(world, prompt) == (missing, held - cached, missing)
    provenance = provenance_of(world, "t2")
    assert provenance.prefilled_tokens == provenance.transferred_tokens == missing
    assert (provenance.borrowed_tokens, provenance.borrowed_bytes) == (held - cached, (held - cached) * BYTES_PER_TOKEN)
    assert world.outputs["t2"][-1].cached_tokens == held
    assert read(world.prefill, "jdisagg_borrowed_tokens_total") == held - cached
    assert world.decode.scheduler.stats.prefill_tokens == 0


def test_what_d_lends_and_keeps_on_its_device_is_counted_there() -> None:
    world, told = World(local_prefill=False, want_min_tokens=4), list[int]()
    on_published = world.lender.on_published

    def note(*event: Any, stays_tokens: int) -> Any:
        told.append(stays_tokens)
        return on_published(*event, stays_tokens=stays_tokens)

    world.lender.on_published = note  # type: ignore[method-assign]
    prompt = first_turn(world)
    world.lent.stays = True
    serve_second_turn(world, prompt)
    assert told == [CHUNK_TOKENS, CHUNK_TOKENS]


def test_third_turn_finds_what_was_borrowed_in_the_prefix_cache_of_p() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world, max_tokens=8)
    serve_second_turn(world, prompt)
    answer = expected(prompt, 4, ignore_eos=True)
    before = moved(world)
    third = (*prompt, *answer, 9)
    world.submit(request("t3", third, 3, ignore_eos=True))
    world.settle()
    held = (len(third) - 2) // 4 * 4  # the last token of the second answer was never fed
    down, up, computed = since(world, before)
    assert world.tokens("t3") == expected(third, 3, ignore_eos=True)
    assert (down, computed) == (len(third) - held, len(third) - held)
    assert up == held - len(prompt) // 4 * 4


def test_each_side_fetches_from_the_other_one_and_not_for_ever() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    world.network.fetches.clear()
    began_s = world.now_s
    world.submit(request("t2", prompt, 4, ignore_eos=True, deadline_s=began_s + 100.0))
    world.settle()
    fetches = world.network.fetches
    assert [peer for _, peer, _ in fetches] == ["d0", "d0", "p0"], "two pieces are lent, one is new"
    assert all(began_s < deadline_s <= began_s + 100.0 for _, _, deadline_s in fetches)
    assert all(deadline_s <= world.now_s + LONGEST_S for _, peer, deadline_s in fetches if peer == "d0")


def test_two_that_borrow_at_once_do_not_wait_for_each_other() -> None:
    """Both get their pages at P in one step."""
    world = World(local_prefill=False, want_min_tokens=4, decode_pages=40)
    turns = {"t1": first_turn(world)}
    other = tuple(range(30, 41))
    world.submit(request("u1", other, 14, ignore_eos=True))
    world.settle()
    turns["u1"] = (*other, *world.tokens("u1"), 7, 8)
    for name, prompt in turns.items():
        world.submit(request(f"{name}+", prompt, 4, ignore_eos=True))
    world.settle()
    assert [world.tokens(f"{name}+") for name in turns] == [expected(prompt, 4, ignore_eos=True) for prompt in turns.values()]
    outcomes = world.prefill.metrics.transfer.borrowings
    assert [outcomes.labels(outcome=name)._value.get() for name in ("complete", "stalled")] == [2, 0]


@pytest.mark.parametrize(
    "options",
    [{"want_min_tokens": 0}, {"want_min_tokens": 13}, {"want_min_tokens": 4, "dtypes": ("float32", "bfloat16")}],
    ids=["off", "too little", "unlike dtypes"],
)
def test_what_is_not_worth_it_or_not_equal_is_computed(options: dict[str, Any]) -> None:
    world = World(local_prefill=False, **options)
    prompt = first_turn(world)
    held, cached = 24, 8
    if options["want_min_tokens"] == 13:
        prompt = prompt[:21]  # D holds 20 of it, 12 more than P
        held = 20
    down, up, computed = serve_second_turn(world, prompt)
    assert (down, up, computed) == (len(prompt) - held, 0, len(prompt) - cached)
    assert provenance_of(world, "t2").borrowed_tokens == 0


def test_prompt_logprobs_are_computed_at_every_position() -> None:
    world = World(local_prefill=False, want_min_tokens=4)
    prompt = first_turn(world)
    before = moved(world)
    asked = request("t2", prompt, 4)
    asked = type(asked)(
        request_id="t2", prompt_token_ids=prompt, deadline_s=asked.deadline_s,
        sampling=SamplingParams(max_tokens=4, prompt_logprobs=0, ignore_eos=True),
    )  # fmt: skip
    world.submit(asked)
    world.settle()
    assert since(world, before)[1:] == (0, len(prompt))


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (2, 4)], ids=["equal pages", "larger at P", "smaller at P"])
def test_prompts_that_end_where_the_held_ones_do(extra: int, sizes: tuple[int, int]) -> None:
    """D holds all of it, all but the last token, or ends within a page of either side: P computes at least one token."""
    world = World(local_prefill=False, want_min_tokens=1, prefill_pages=30, prefill_page_size=sizes[0])
    prompt = first_turn(world)[: 20 + extra]
    page = sizes[0]
    held = len(prompt) // 4 * 4
    cached = len(PROMPT) // page * page
    usable = min(held, len(prompt) - 1) // page * page
    assert serve_second_turn(world, prompt) == (len(prompt) - held, usable - cached, len(prompt) - usable)


def test_the_first_piece_is_at_d_before_the_last_chunk_is_planned() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", tuple(range(1, 46)), 2))  # four chunks of at most 12 tokens
    planned_before = 0
    while read(world.decode, "jdisagg_transfer_bytes_total") == 0:
        planned_before = world.prefill.scheduler.stats.prefill_tokens
        world.prefill.tick(world.now_s)
        for _ in range(3):  # messages are faster than a chunk
            world.network.step()
            world.decode.tick(world.now_s)
    assert 0 < planned_before < 45
    world.settle()
    assert read(world.decode, "jdisagg_transfer_bytes_total") == 45 * BYTES_PER_TOKEN
