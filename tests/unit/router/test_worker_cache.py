"""What a prefill worker was sent so long ago that its cache has no room for it any more does not draw requests to it."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.errors import DeadlineExceeded
from jdisagg.core.requests import FinishReason, Output, Provenance, SamplingParams
from jdisagg.router.booking import Booking
from jdisagg.router.entry import Entry
from jdisagg.router.flight import Flight
from jdisagg.router.prefixes import Kept, Near, Prefixes, beginnings_of
from jdisagg.router.usable import ANY_REQUEST
from jdisagg.router.worker_cache import LOST_WEIGHT, PAGE_TOKENS, WorkerCache
from tests.unit.router.test_busy_workers import prefill_fleet
from tests.unit.router.test_shared_beginnings import Desk, desk, document, question
from tests.unit.wire.rig import request

D1 = ("d1", "epoch")


def small_desk(num_each: int, cache_tokens: int) -> tuple[Desk, list[Entry]]:
    """And its prefill workers, which cache so much each."""
    at = desk(num_each)
    peers = [entry for entry in at.fleet.entries() if not entry.member.decodes]
    for peer in peers:
        peer.cache.num_tokens = cache_tokens
    return at, peers


def desk_asked_twice(cache_tokens: int) -> tuple[Desk, Entry]:
    """And its one prefill worker, which was asked about one document, and again once it had it."""
    at, (peer,) = small_desk(1, cache_tokens)
    for number in (1, 2):
        at.end_all()
        at.place(document(1), question(number))
    return at, peer


def test_what_a_cache_has_room_for_counts_and_of_an_older_prompt_the_beginning() -> None:
    prefixes, cache = Prefixes(), WorkerCache(("p1", "epoch"), 320)
    old, new = beginnings_of(list(range(128))), beginnings_of(list(range(1000, 1256)))
    cache.written += 128
    prefixes.note(old, D1, cache)
    cache.written += 192
    assert prefixes.find(old).prefills == {cache.key: Kept(128, 192)}
    cache.written += 64
    assert prefixes.find(old).prefills == {cache.key: Kept(64, 256)}, "the end goes first"
    prefixes.note(new, D1, cache)
    cache.written += 64
    assert prefixes.find(old).prefills == {}
    assert prefixes.find(new).prefills == {cache.key: Kept(256, 64)}
    assert prefixes.find(old).decodes == {D1: 128}


def test_what_is_used_again_is_the_latest_and_a_shorter_beginning_of_it_too() -> None:
    prefixes, cache = Prefixes(), WorkerCache(("p1", "epoch"), 256)
    head = list(range(96))
    cache.written += 192
    prefixes.note(beginnings_of([*head, *range(1000, 1096)]), D1, cache)
    cache.written += 96
    prefixes.note(beginnings_of([*head, *range(2000, 2096)]), D1, cache)
    cache.written += 128
    assert prefixes.find(beginnings_of([*head, *range(1000, 1096)])).prefills == {cache.key: Kept(96, 128)}


def test_a_worker_that_says_nothing_of_its_cache_is_thought_to_keep_everything() -> None:
    prefixes, cache, chain = Prefixes(), WorkerCache(("p1", "epoch")), beginnings_of(list(range(128)))
    prefixes.note(chain, D1, cache)
    cache.written += 10**12
    assert prefixes.find(chain).prefills == {cache.key: Kept(128, 10**12)}


def test_only_what_was_not_cached_is_written() -> None:
    at, (p0,) = small_desk(1, 4000)
    at.place(document(1), question(1))
    written = p0.cache.written
    assert written == 3051, "of the prompt and a token"
    for number in range(2, 20):
        at.place(document(1), question(number))
    assert p0.cache.written - written < 18 * 250, "little more than the questions"
    at.end_all()


def test_a_prompt_that_was_pushed_out_draws_nobody_behind_others_that_wait() -> None:
    for later, is_drawn in ((500, True), (4000, False)):
        at, (p0, p1) = small_desk(2, 4000)
        _, home = at.place(document(1), question(1))
        at.end_all()
        (had,) = (peer for peer in (p0, p1) if peer.member.address == home)
        had.cache.written += later
        had.others_tokens = 1000
        assert (at.place(document(1), question(2))[1] == home) is is_drawn
        at.end_all()


def test_a_process_that_was_gone_for_a_while_is_remembered_once() -> None:
    at, _ = small_desk(2, 4000)
    at.place(document(1), question(1))
    at.end_all()
    had = next(entry for entry in at.fleet.entries() if entry.cache.written)
    at.fleet.remove(had)
    at.fleet.register(had.member, 0.0)
    (back,) = (entry for entry in at.fleet.entries() if entry.key == had.key)
    assert back is not had
    back.cache.written += 4000
    back.others_tokens = 1000
    assert at.place(document(1), question(2))[1] != back.member.address
    at.end_all()


def test_a_prompt_is_computed_by_a_second_worker_later_the_more_workers_are_busy() -> None:
    p0, p1, p2 = (fleet := prefill_fleet()).entries()
    near = Near({}, {p0.key: Kept(1000)})
    p0.pending, p0.pending_tokens = 1, 1020
    assert fleet.prefill_peers("f", ANY_REQUEST, near)[0] is p0, "20 tokens more, of 1000: one of three is busy"
    p0.pending_tokens = 1030
    assert fleet.prefill_peers("f", ANY_REQUEST, near)[0] is not p0
    p1.pending, p2.others_tokens = 1, 1
    p0.pending_tokens, p1.pending_tokens = 1249, 1
    assert fleet.prefill_peers("f", ANY_REQUEST, near)[0] is p0, "all are busy"
    p0.pending_tokens = 1252
    assert fleet.prefill_peers("f", ANY_REQUEST, near)[0] is not p0


def answer(at: Desk, num_computed: int, **fields: Any) -> None:
    """The first token of the latest request."""
    flight = at.live[-1]
    assert flight.prefill is not None
    worker = flight.prefill.entry.member.worker
    provenance = Provenance(**{"prefill_worker": worker, "prefilled_tokens": num_computed} | fields)
    at.placement.heard(flight, Output(request_id="any", token_ids=(1,), provenance=provenance))


def test_a_worker_that_computed_what_it_was_thought_to_have_is_thought_to_have_less_of_the_others() -> None:
    at, (p0,) = small_desk(1, 100_000)
    at.place(document(1), question(1))
    answer(at, 3050)
    at.place(document(1), question(2))
    written = p0.cache.written
    answer(at, 3050)
    assert p0.cache.written == written + LOST_WEIGHT * 2944, "of which all was thought to be there"
    at.end_all()


@pytest.mark.parametrize(
    ("num_computed", "fields"),
    [
        (50 + PAGE_TOKENS, {}),  # the rest of a page, and its question
        (3050, {"prefill_worker": "another"}),
        (6100, {}),  # it lost its pages to others on the way, and computed everything twice
    ],
)
def test_what_says_nothing_of_a_cache_changes_nothing(num_computed: int, fields: dict[str, Any]) -> None:
    at, p0 = desk_asked_twice(100_000)
    written = p0.cache.written
    answer(at, num_computed, **fields)
    assert p0.cache.written == written
    at.end_all()


def test_a_prompt_whose_log_probabilities_are_asked_for_says_nothing_of_a_cache() -> None:
    at, (p0,) = small_desk(1, 100_000)
    at.place(document(1), question(1))
    at.end_all()
    asked = SamplingParams(max_tokens=8, prompt_logprobs=1)
    at.live.append(flight := Flight(request("scored", prompt=document(1) + question(2), sampling=asked)))
    at.placement.begin(flight)
    assert at.placement.place(flight, 0.0)
    written = p0.cache.written
    answer(at, 3050)
    assert p0.cache.written == written
    at.end_all()


def test_a_prompt_that_a_worker_had_lost_it_has_again() -> None:
    at, p0 = desk_asked_twice(4000)
    answer(at, 3050)
    at.end_all()
    at.place(document(1), question(3))
    flight = at.live[-1]
    assert flight.prefill == Booking(p0, 3051, 2944, p0.cache.written, tells_cache=True), "of which all is cached"
    at.end_all()


def test_what_a_worker_was_still_computing_for_another_was_not_lost() -> None:
    at, (p0,) = small_desk(1, 100_000)
    for number in (1, 2):
        at.place(document(1), question(number))
    written = p0.cache.written
    answer(at, 3050)  # it came before the first one was done
    assert p0.cache.written == written
    at.end_all()


def test_what_was_fetched_from_d_was_not_found() -> None:
    at, p0 = desk_asked_twice(100_000)
    written = p0.cache.written
    answer(at, 50, borrowed_tokens=3000)
    assert p0.cache.written == written + LOST_WEIGHT * 2944
    at.end_all()


def asked_one_of_two() -> tuple[Desk, Entry, Entry]:
    """Two prefill workers that cache 40,000 tokens: which of them was asked about one document, and which was not."""
    at, peers = small_desk(2, 40_000)
    at.place(document(1), question(1))
    (asked,) = (peer for peer in peers if peer.cache.written)
    return at, asked, next(peer for peer in peers if peer is not asked)


def kept(at: Desk, *parts: tuple[int, ...]) -> dict[str, int]:
    """What prefill workers are thought to have of such a prompt, by address."""
    near = at.placement._prefixes.find(beginnings_of(sum(parts, ())))
    return {address: each.num_tokens for (address, _), each in near.prefills.items()}


def test_what_another_prefill_worker_computed_that_one_has_and_who_was_asked_has_not() -> None:
    at, asked, other = asked_one_of_two()
    answer(at, 3000, prefill_worker=other.member.worker, borrowed_tokens=50)
    assert (asked.cache.written, other.cache.written) == (0, 3050)
    assert kept(at, document(1), question(3)) == {other.member.address: 2944}
    at.end_all()


def test_what_another_prefill_worker_computed_the_one_that_was_asked_has_as_far_as_it_had_it_before() -> None:
    at, asked, other = asked_one_of_two()
    at.end_all()
    at.place(document(1), document(2))
    answer(at, 6000, prefill_worker=other.member.worker)
    assert (asked.cache.written, other.cache.written) == (3051, 6000)
    assert kept(at, document(1), document(2)) == {asked.member.address: 2944, other.member.address: 5888}
    at.end_all()


def test_what_another_prefill_worker_says_that_it_computed_is_no_more_than_the_prompt() -> None:
    """Beyond 64 bits nothing could be noted of its cache any more, and every later request there would fail."""
    at, asked, other = asked_one_of_two()
    most = 2**63 - 1  # of a count on the wire
    for written in (3051, 2 * 3051):
        answer(at, most, prefill_worker=other.member.worker, borrowed_tokens=most)
        assert other.cache.written == written
        at.end_all()
        other.others_tokens = 100_000
        at.place(document(1), question(2))
        assert at.live[-1].prefill is not None
        assert at.live[-1].prefill.entry is asked
    at.end_all()


@pytest.mark.parametrize(("worker", "is_written"), [("", False), ("h:1", True)])
def test_what_a_decode_worker_computed_itself_no_prefill_worker_has(worker: str, is_written: bool) -> None:
    """A worker that is named by its address is too old to say who it is with its first token."""
    at, asked, _ = asked_one_of_two()
    flight = at.live[-1]
    at.placement.heard(flight, Output(request_id="any", token_ids=(1,)))
    assert asked.cache.written == 3051
    provenance = Provenance(prefill_worker=worker, decode_worker="d", prefilled_tokens=3050)
    at.placement.heard(flight, Output(request_id="any", finish=FinishReason.STOP, provenance=provenance))
    assert asked.cache.written == (3051 if is_written else 0)
    assert kept(at, document(1), question(1)) == ({asked.member.address: 2944} if is_written else {})
    at.end_all()


def test_what_was_given_up_before_its_first_token_nobody_has_and_part_of_it_may_have_been_written() -> None:
    at, asked, _ = asked_one_of_two()
    at.place(document(1), document(2))
    written = asked.cache.written
    at.placement.leave(at.live.pop())
    assert asked.cache.written == written
    assert kept(at, document(1), document(2)) == {asked.member.address: 2944}
    at.end_all()
    assert kept(at, document(1), document(2)) == {asked.member.address: 2944}


def test_what_failed_before_its_first_token_was_given_up_too() -> None:
    """Every last output names its decode worker, which is not to say that it computed the prompt."""
    at, asked, _ = asked_one_of_two()
    late, provenance = DeadlineExceeded("late"), Provenance(decode_worker="d")
    at.placement.heard(at.live[-1], Output(request_id="any", finish=FinishReason.ERROR, error=late, provenance=provenance))
    at.placement.leave(at.live.pop())
    assert asked.cache.written == 3051
    assert kept(at, document(1), question(1)) == {}
    at.end_all()


def test_what_was_given_up_the_worker_has_if_it_was_asked_for_it_again_meanwhile() -> None:
    at, (p0,) = small_desk(1, 40_000)
    for number in (1, 2):
        at.place(document(1), question(number))
    at.placement.leave(at.live.pop(0))
    assert kept(at, document(1), question(3)) == {p0.member.address: 2944}
    at.end_all()


def test_what_ended_without_a_token_was_computed_all_the_same() -> None:
    at, asked, _ = asked_one_of_two()
    provenance = Provenance(prefill_worker=asked.member.worker, decode_worker="d", prefilled_tokens=3050)
    at.placement.heard(at.live[-1], Output(request_id="any", finish=FinishReason.STOP, provenance=provenance))
    at.placement.leave(at.live.pop())
    assert kept(at, document(1), question(1)) == {asked.member.address: 2944}


def test_what_is_thought_of_a_prefill_worker_is_there_to_be_looked_at() -> None:
    at, (peer,) = small_desk(1, 8192)
    at.place(document(1), question(1))
    at.end_all()
    at.place(document(1), question(2))
    peer.others_tokens = 70
    shown = {name: value for name, value in peer.summary(0.0).items() if name.endswith("_tokens")}
    assert shown == {
        "pending_tokens": 3051,
        "pending_cached_tokens": 2944,
        "others_tokens": 70,
        "cache_tokens": 8192,
        "cache_written_tokens": 3051 + 3051 - 2944,
    }
    (decode,) = (entry for entry in at.fleet.entries() if entry.member.decodes)
    assert not [name for name in decode.summary(0.0) if name.endswith("_tokens")]
