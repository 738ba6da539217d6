"""What a decode worker says at the end of a request whose KV came in more than one hand-off."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.requests import FinishReason, Output, Provenance
from jdisagg.roles.provenance_book import ProvenanceBook

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


def test_of_a_request_that_is_over_nothing_is_kept() -> None:
    book = ProvenanceBook(page_size=4)
    book.arrived("r", FIRST_TIME)
    book.arrived("other", SECOND_TIME)
    for _ in range(2):
        book.forget("r")
    assert book.signed(LAST) == LAST
    assert list(book._of) == ["other"]
