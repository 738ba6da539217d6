"""What a worker says at the end of a request of where it was computed: KV may have come in more than one hand-off, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.requests import FinishReason, Output, Provenance
from jdisagg.roles.provenance_book import ProvenanceBook
from tests.unit.roles.measured import Unified
from tests.unit.roles.world import World
from tests.unit.sched.engine_fake import request

LAST = Output(request_id="r", finish=FinishReason.LENGTH)
FIRST_TIME = Provenance(
    prefill_worker="p", prefilled_tokens=10, transferred_tokens=10, transferred_bytes=100, borrowed_tokens=4,
    borrowed_bytes=40, recoveries=("refetch",),
)  # fmt: skip
SECOND_TIME = Provenance(prefill_worker="q", prefilled_tokens=3, transferred_tokens=13, transferred_bytes=130)


def test_what_came_before_a_sequence_lost_its_pages_and_was_fetched_again_is_said_too() -> None:
    book = ProvenanceBook(page_size=4)
    book.arrived("r", FIRST_TIME)
    book.arrived("r", SECOND_TIME)
    assert book.signed(LAST).provenance == Provenance(
        prefill_worker="q", prefilled_tokens=13, transferred_tokens=23, transferred_pages=3 + 4, transferred_bytes=230,
        borrowed_tokens=4, borrowed_bytes=40, recoveries=("refetch",),
    )  # fmt: skip


def test_the_prompt_that_is_computed_here_after_all_names_who_brought_the_last_of_it() -> None:
    book = ProvenanceBook(page_size=4)
    book.arrived("r", replace(FIRST_TIME, prefilled_tokens=0))
    book.arrived("r", Provenance(recoveries=("local_prefill",)))
    signed = book.signed(replace(LAST, provenance=Provenance(prefilled_tokens=5))).provenance
    assert signed is not None
    assert (signed.prefill_worker, signed.prefilled_tokens, signed.transferred_tokens) == ("p", 5, 10)
    assert signed.recoveries == ("refetch", "local_prefill")


def test_a_request_that_ends_with_a_later_hand_off_says_what_the_earlier_one_brought() -> None:
    book = ProvenanceBook(page_size=4)
    own = replace(LAST, provenance=Provenance(prefill_worker="q", prefilled_tokens=3, recoveries=("reconnect",)))
    assert book.ended(own) == own
    book.arrived("r", FIRST_TIME)
    going_on = replace(own, finish=None)
    assert book.ended(going_on) == going_on
    told = replace(
        FIRST_TIME, prefill_worker="q", prefilled_tokens=13, transferred_pages=3, recoveries=("refetch", "reconnect")
    )
    assert book.ended(own).provenance == told
    book.arrived("failed", FIRST_TIME)
    assert book.ended(Output(request_id="failed", finish=FinishReason.ERROR)).provenance == replace(
        FIRST_TIME, transferred_pages=3
    )


@pytest.mark.usefixtures("no_sleep")
def test_a_request_that_lost_its_pages_and_ends_with_the_token_of_its_second_prefill_says_what_was_transferred() -> None:
    world = World(
        local_prefill=False, decode_pages=12, prefill_pages=80, buffer_bytes=400, reserved_decode_tokens=0, caching=False
    )
    world.submit(request("a", tuple(range(1, 14)), 13))
    world.submit(request("b", tuple(range(2, 9)), 12))
    world.settle()
    assert world.decode.scheduler.stats.retractions == 1
    last = world.outputs["b"][-1]
    assert (last.finish, len(last.token_ids)) == (FinishReason.LENGTH, 1)
    assert last.provenance is not None
    assert (last.provenance.transferred_tokens, last.provenance.transferred_pages) == (7, 2)
    assert last.provenance.prefilled_tokens == 7 + 14, "and the second time, but for a page that P had"


@pytest.mark.usefixtures("no_sleep")
def test_what_was_transferred_is_said_before_the_end_once_for_who_ends_an_answer_at_a_stop_string() -> None:
    world = World(local_prefill=False)
    world.submit(request("a", tuple(range(1, 14)), 6))
    world.settle()
    outputs = world.outputs["a"]
    told = [index for index, output in enumerate(outputs) if output.provenance and output.provenance.transferred_tokens]
    first, last = told
    assert last == len(outputs) - 1
    assert first <= 1
    assert outputs[first].provenance == outputs[last].provenance


def test_what_a_second_hand_off_brought_is_said_with_the_next_token() -> None:
    book = ProvenanceBook(page_size=4)
    token = Output(request_id="r", token_ids=(7,))
    for provenance, prefilled_tokens in ((FIRST_TIME, 10), (SECOND_TIME, 13)):
        book.arrived("r", provenance)
        told = book.signed(token).provenance
        assert told is not None
        assert told.prefilled_tokens == prefilled_tokens
        assert book.signed(token) == token


def test_of_a_request_that_is_over_nothing_is_kept() -> None:
    book = ProvenanceBook(page_size=4)
    book.arrived("r", FIRST_TIME)
    book.arrived("other", SECOND_TIME)
    for _ in range(2):
        book.forget("r")
    assert book.signed(LAST) == LAST
    assert list(book._of) == ["other"]
    assert book._untold == {"other"}


@pytest.mark.usefixtures("no_sleep")
def test_where_nothing_is_handed_over_the_first_and_the_last_output_name_their_worker_and_what_was_computed() -> None:
    unified = Unified()
    for name in ("first", "again"):
        unified.submit(request(name, tuple(range(1, 10)), 2))
        unified.run()
    told = [(output.request_id, output.finish is None, output.provenance) for output in unified.outputs]
    assert [one[:2] for one in told] == [("first", True), ("first", False), ("again", True), ("again", False)]
    made = [Provenance(decode_worker="unified", prefilled_tokens=computed) for computed in (9, 1)]
    assert [one[2] for one in told] == [made[0], made[0], made[1], made[1]]
