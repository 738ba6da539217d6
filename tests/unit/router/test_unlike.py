"""Workers of the same weights that compute unlike bits in `exact`: who is asked, and what operators are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.bits import UNLIKE_REQUESTS, UNLIKE_TOKENS
from jdisagg.core.fleet import Member, State
from jdisagg.core.requests import Output, Role
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_unlike
from jdisagg.router.flight import Flight
from jdisagg.router.partners import Usual
from jdisagg.router.prefixes import NOWHERE, Kept, Near
from jdisagg.router.usable import ANY_REQUEST, Wishes
from jdisagg.router.watch import SETTLE_S, FleetWatch
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, entry_at, fleet, look, stop, tokens
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.router.test_late_registrations import MEMBER
from tests.unit.wire.rig import member, request, run_quiet, until

NOW_S = 10.0
A, B = "a48-aaaa", "a48-bbbb"


def worker(number: int, bits: str, *, role: Role = Role.DECODE, weights: str = "weights") -> Member:
    worker = f"pid {number} @ h:{number}"
    like = member(MEMBER, role=role, address=f"h:{number}", epoch=f"e{number}", worker=worker, fingerprint=weights)
    return replace(like, bits=bits)


def test_the_bits_of_most_are_the_usual_ones_of_their_weights() -> None:
    odd, others = worker(1, B), [worker(2, A), worker(3, A)]
    unsaid, apart = worker(4, ""), worker(5, B, weights="others")
    usual = Usual([odd, *others, unsaid, apart])
    assert [usual.lacks(one) for one in (odd, *others, unsaid, apart)] == [True, False, False, False, False]
    assert usual.differs(odd) == f"bits {B}, where 2 workers of its weights compute {A}"
    assert Usual([odd, others[0]]).lacks(others[0]), "of as many the first ones"


def test_those_that_drain_are_neither_counted_nor_unlike() -> None:
    old, new = [replace(worker(n, A), draining=True) for n in (1, 2)], [worker(3, B), worker(4, B)]
    assert not any(map(Usual([*old, *new]).lacks, (*old, *new)))
    assert not any(map(Usual([*old, new[0]]).lacks, (*old, new[0]))), "though these are more"


def test_many_that_hold_less_and_tried_fewer_tokens_hide_nobody() -> None:
    odd, like, short = worker(1, B), [worker(2, A), worker(3, A)], [worker(n, "a15-cccc") for n in (4, 5, 6)]
    usual = Usual([odd, *like, *short])
    assert [usual.lacks(one) for one in (odd, *like, *short)] == [True, *[False] * 5]


def test_those_that_compute_unlike_others_each_in_a_way_of_its_own_are_named_with_their_bits() -> None:
    watch, apart = FleetWatch(), [worker(n, bits, weights="others") for n, bits in ((7, A), (8, A), (9, B))]
    members = [*[worker(n, A) for n in (1, 2, 3)], worker(4, B), worker(5, "a48-cccc"), worker(6, B), *apart]
    assert look(watch, members, 0.0) is None
    said = look(watch, members, SETTLE_S)
    assert said is not None
    assert said.startswith(
        f"decode worker pid 4 @ h:4, decode worker pid 6 @ h:6: bits {B}, where 3 workers of its weights compute {A}; "
        f"decode worker pid 5 @ h:5: bits a48-cccc, where 3 workers of its weights compute {A}; "
        f"decode worker pid 9 @ h:9: bits {B}, where 2 workers of its weights compute {A}: a stream that moves"
    )


def test_who_computes_other_bits_is_named_once_it_stays_so() -> None:
    watch, members = FleetWatch(), [worker(1, A), worker(2, A, role=Role.PREFILL), worker(3, B)]
    assert look(watch, members, 0.0) is None, "an upgrade passes through it"
    assert look(watch, members, SETTLE_S - 0.1) is None
    said = look(watch, members, SETTLE_S)
    assert said is not None
    assert said.startswith(f"decode worker pid 3 @ h:3: bits {B}, where 2 workers of its weights compute {A}: ")
    assert "--tensor-parallel-size" in said
    assert look(watch, members, 9 * SETTLE_S) is None


def test_who_joins_them_is_news_and_who_leaves_is_not() -> None:
    watch = FleetWatch()
    alike, odd, odder = [worker(n, A) for n in (1, 2, 3, 4)], worker(5, B), worker(6, B)
    found = []
    for step, members in enumerate([[*alike, odd], [*alike, odd], [*alike, odd, odder], [*alike, odd, odder], [*alike, odder]]):
        found.append(look(watch, members, step * SETTLE_S))
    found += [look(watch, [*alike, odder], 9 * SETTLE_S), look(watch, alike, 10 * SETTLE_S)]
    assert [said is not None for said in found] == [False, True, False, True, False, False, False]
    assert found[3] is not None
    assert found[3].startswith("decode worker pid 5 @ h:5, decode worker pid 6 @ h:6: bits ")
    assert [look(watch, [*alike, odd], n * SETTLE_S) is not None for n in (11, 12)] == [False, True], "it is back"


def test_fleet_list_says_so_of_one_that_serves_and_the_metric_counts_it() -> None:
    fleet = Fleet(dead_after_s=1.0)
    for one in (worker(1, A, role=Role.PREFILL), worker(2, A), worker(3, B)):
        fleet.register(one, NOW_S)
    for entry in fleet.entries():
        fleet.link(entry, NOW_S)
    found = {one.address: standing for one, standing in fleet.standings(NOW_S)}
    for address in ("h:1", "h:2"):
        assert (found[address].state, found[address].why, found[address].requests) == (State.SERVING, "", 0)
    assert found["h:3"].state is State.SERVING
    assert found["h:3"].why.startswith(f"bits {B}, where 2 workers of its weights compute {A}: a stream that moves")
    assert count_unlike(fleet) == {Role.DECODE: 1}
    odd = entry_at(fleet, "h:3")
    odd.suspect_until_s = NOW_S + 1.0
    assert [standing.why[:5] for _, standing in fleet.standings(NOW_S)] == ["", "", "bits "], "whatever else is the matter"
    odd.member = replace(odd.member, draining=True)
    assert not count_unlike(fleet), "it is about to go"
    assert [standing.why for _, standing in fleet.standings(NOW_S)] == [""] * 3


def test_a_prompt_is_computed_by_who_has_the_bits_of_its_decode_worker_until_too_much_waits_there() -> None:
    fleet = idle_fleet("d1")
    like = fleet.entries()[0].member
    for name, bits in (("p1", A), ("p2", B), ("p3", "")):
        fleet.register(replace(member(like, role=Role.PREFILL, address=name, epoch=name), bits=bits), NOW_S)
    p1 = entry_at(fleet, "p1")
    p1.pending_tokens = 1000

    def asked(bits: str) -> list[str]:
        return [peer.member.address for peer in fleet.prefill_peers(like.card.fingerprint, ANY_REQUEST, NOWHERE, bits=bits)]

    assert asked(A)[-1] == "p2"
    assert asked(B)[-1] == "p1"
    assert asked("")[-1] == "p1", "busy, and no worse than the others but for that"
    d1 = fleet.entries()[0]
    d1.member = replace(d1.member, bits=A)
    told = fleet.prefill_for(d1)
    assert told is not None
    assert told[-1] == "p2"
    p1.pending_tokens = UNLIKE_TOKENS - 1
    assert asked(A) == ["p3", "p1", "p2"]
    p1.pending_tokens = UNLIKE_TOKENS + 1
    assert asked(A) == ["p3", "p2", "p1"], "else a roll-out would have all prompts wait for the last old one"


def test_a_prompt_that_one_of_other_bits_has_cached_is_computed_anew_by_one_of_the_bits_wanted() -> None:
    fleet = idle_fleet("d1")
    like = fleet.entries()[0].member
    for name, bits in (("p1", A), ("p2", B)):
        fleet.register(replace(member(like, role=Role.PREFILL, address=name, epoch=name), bits=bits), NOW_S)
    p2 = entry_at(fleet, "p2")
    near = Near(prefills={p2.key: Kept(9000)})

    def first(bits: str) -> str:
        return fleet.prefill_peers(like.card.fingerprint, ANY_REQUEST, near, bits=bits)[0].member.address

    assert [first(""), first(B), first(A)] == ["p2", "p2", "p1"]


def test_a_stream_does_not_follow_its_prompt_to_a_worker_of_other_bits() -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    for entry, bits in ((d1, A), (d2, B)):
        entry.member, entry.pending = replace(entry.member, bits=bits), 100  # of so many, 16 more are not much
    near = Near(decodes={d2.key: 9000})
    assert fleet.choose(None, NOW_S, wishes=Wishes(near=near)) is d2
    assert fleet.choose(None, NOW_S, wishes=Wishes(near=near, bits=A)) is d1


def test_a_stream_goes_on_at_a_worker_of_its_bits_until_that_is_much_busier() -> None:
    fleet = idle_fleet("d1", "d2")
    d1, d2 = fleet.entries()
    for entry, bits in ((d1, A), (d2, B)):
        entry.member = replace(entry.member, bits=bits)
    d1.pending = UNLIKE_REQUESTS - 1
    assert fleet.choose(None, NOW_S, wishes=Wishes(bits=A)) is d1
    assert fleet.choose(None, NOW_S) is d2, "one that has not begun: the less busy one, as ever"
    d1.pending = UNLIKE_REQUESTS + 1
    assert fleet.choose(None, NOW_S, wishes=Wishes(bits=A)) is d2
    d2.pending = 5
    assert fleet.choose(None, NOW_S, wishes=Wishes(bits=A)) is d1
    d1.member = replace(d1.member, load=replace(d1.member.load, waiting=3))
    assert fleet.choose(None, NOW_S, wishes=Wishes(bits=A)) is d1, (
        "whose prompt is computed elsewhere is no sign that there is no room"
    )


def test_the_streams_of_a_dead_worker_are_spread_over_those_of_their_bits_and_go_to_others_when_these_have_many_more() -> None:
    fleet = idle_fleet("d1", "d2", "d3")
    for entry, bits in zip(fleet.entries(), (A, A, B), strict=True):
        entry.member = replace(entry.member, bits=bits)

    def replayed(count: int) -> list[int]:
        for _ in range(count):
            entry = fleet.choose(None, NOW_S, wishes=Wishes(bits=A))
            assert entry is not None
            entry.pending += 1
        return [entry.pending for entry in fleet.entries()]

    assert replayed(2 * UNLIKE_REQUESTS) == [UNLIKE_REQUESTS, UNLIKE_REQUESTS, 0]
    more = replayed(60)
    assert more[2] > 0
    assert max(more) - min(more) <= UNLIKE_REQUESTS + 1


@pytest.mark.parametrize("is_untouched", [True, False])
def test_a_replayed_stream_keeps_the_bits_that_it_began_with_and_one_that_has_not_begun_has_none(is_untouched: bool) -> None:
    flight = Flight(request("r", prompt=(1, 2, 3)))
    flight.card, flight.bits = MEMBER.card, A
    if not is_untouched:
        flight._delivered.append(7)  # pyright: ignore[reportPrivateUsage]
    flight.replay()
    assert flight.bits == ("" if is_untouched else A)


def test_a_request_names_prefill_workers_of_the_bits_of_its_decode_worker_first() -> None:
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        ps = {bits: FakeWorker(where, Role.PREFILL, bits=bits) for bits in (A, B)}
        for number, bits in enumerate((A, B)):
            decode = FakeWorker(where, bits=bits)
            await fleet(*(ps.values() if bits == A else ()), decode, router=router)
            await until(lambda: len(router.engine.workers.members()) == 3)
            assert_whole(asked := ask(f"r{number}"), await collect(router, asked))
            assert decode.engine.seen[0].prefill_peers == (ps[bits].address, ps[A if bits == B else B].address)
            await decode.die()
            await until(lambda: len(router.engine.workers.members()) == 2)
        await stop(router, *ps.values())

    run_quiet(body())


def test_a_stream_whose_worker_dies_goes_on_where_its_bits_are_computed_though_that_worker_is_busier() -> None:
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        first = await FakeWorker(where, bits=A).start()
        await until(lambda: router.linked() == 1)
        asked, outputs = ask("r1", max_tokens=400), list[Output]()
        task = asyncio.create_task(collect(router, asked, outputs))
        await until(lambda: tokens(outputs))
        like, odd = FakeWorker(where, bits=A), FakeWorker(where, bits=B)
        for worker in (like, odd):
            await worker.start()
        await until(lambda: router.linked() == 3)
        like_entry = entry_at(router.engine.workers.fleet, like.address)
        like_entry.pending += UNLIKE_REQUESTS - 1
        await first.die()
        assert_whole(asked, await task)
        like_entry.pending -= UNLIKE_REQUESTS - 1
        assert [len(worker.engine.seen) for worker in (like, odd)] == [1, 0]
        await stop(router, like, odd)

    run_quiet(body())
