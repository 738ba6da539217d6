"""A prompt that begins as an earlier one did meets the caches of the workers that had it, unless those are too busy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.requests import EngineRequest, Role, SamplingParams
from jdisagg.router import placement
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.prefixes import BLOCK_TOKENS, MOST_HOMES, NEAR_PART, Beginning, Kept, Near, Prefixes, beginnings_of
from jdisagg.router.usable import ANY_REQUEST, Wishes
from jdisagg.router.worker_cache import WorkerCache
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import collect, fleet, stop
from tests.unit.router.test_busy_workers import prefill_fleet
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.wire.rig import member, request, run_quiet, until

D1, D2, P1 = ("d1", "epoch"), ("d2", "epoch"), WorkerCache(("p1", "epoch"))


def prompt(*lengths: int) -> list[int]:
    """Parts of their own of those lengths: equal leading lengths are equal beginnings."""
    return [1000 * length + i for length in lengths for i in range(length)]


@given(common=st.integers(0, 9000), tails=st.tuples(st.integers(1, 9000), st.integers(1, 9000)))
@settings(max_examples=60, deadline=None)
def test_what_two_prompts_have_in_common_is_found_wherever_it_ends(common: int, tails: tuple[int, int]) -> None:
    prefixes, head = Prefixes(), [7] * common
    one, other = (beginnings_of(head + [number] * tail) for number, tail in enumerate(tails))
    prefixes.note(one, D1, P1)
    near, blocks = prefixes.find(other), common // BLOCK_TOKENS * BLOCK_TOKENS
    found = near.decodes.get(D1, 0)
    assert near == Near({D1: found} if found else {}, {P1.key: Kept(found)} if found else {}, near.news)
    assert found <= blocks
    assert found >= blocks * 16 // 17 or blocks * 16 / 17 < (common + tails[1]) / NEAR_PART
    assert len(other) <= 32 + 16 * 5


def test_every_worker_counts_for_what_it_had() -> None:
    prefixes = Prefixes()
    prefixes.note(beginnings_of(prompt(70)), D1, P1)
    prefixes.note(beginnings_of(prompt(70, 80)), D2, None)
    asked = beginnings_of(prompt(70, 80, 33))
    assert prefixes.find(asked) == Near({D1: 64, D2: 128}, {P1.key: Kept(64)}, asked[4][1])
    asked = beginnings_of(prompt(70, 80)[:128])
    assert prefixes.find(asked) == Near({D1: 64, D2: 128}, {P1.key: Kept(64)}, asked[-1][1])
    for unknown in (prompt(63), prompt(70)[1:]):
        asked = beginnings_of(unknown)
        assert prefixes.find(asked) == Near(news=asked[0][1])
    assert prefixes.find(beginnings_of(prompt(31))) == Near()


def test_who_had_less_than_a_quarter_of_a_prompt_is_not_near() -> None:
    prefixes = Prefixes()
    prefixes.note(beginnings_of(prompt(64)), D1, P1)
    assert prefixes.find(beginnings_of(prompt(64, 192))).decodes == {D1: 64}
    asked = beginnings_of(prompt(64, 224))
    assert prefixes.find(asked) == Near(news=asked[2][1])


def test_a_block_counts_only_behind_the_same_ones() -> None:
    one, other = beginnings_of(prompt(32, 32)), beginnings_of(list(reversed(prompt(32, 32))))
    assert len(set(one + other)) == 4
    assert beginnings_of(prompt(32, 32, 40))[:2] == one
    assert not set(one) & set(beginnings_of(prompt(32, 32), "another tenant's"))


def test_choices_of_one_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []

    def counted(token_ids: tuple[int, ...], cache_salt: str) -> list[Beginning]:
        hashed.append(token_ids)
        return beginnings_of(token_ids, cache_salt)

    monkeypatch.setattr(placement, "beginnings_of", counted)
    one, other = tuple(prompt(70)), tuple(prompt(70, 80))

    async def check() -> None:
        router = await Router().start()
        workers = await fleet(FakeWorker((router.address,)), router=router)
        asked = [(one, "c/0")] * 3 + [(other, "c/1")] * 2 + [(one, ""), (one, "")]
        await asyncio.gather(
            *(
                collect(router, request(f"r/{number}", prompt=ids, fork_group=group, sampling=SamplingParams(max_tokens=2)))
                for number, (ids, group) in enumerate(asked)
            )
        )
        await stop(router, *workers)

    run_quiet(check())
    assert hashed == [one, other, one, one]


def test_so_many_beginnings_are_remembered_and_the_oldest_are_forgotten_of_a_prompt_the_longest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jdisagg.router.prefixes.MOST_BEGINNINGS", 6)
    prefixes = Prefixes()
    chains = [beginnings_of([number] * 2 * BLOCK_TOKENS) for number in range(4)]
    for chain in chains[:3]:
        prefixes.note(chain, D1, None)
    prefixes.note(chains[0], D2, None)  # again: now the latest
    prefixes.note(chains[3][:1], D1, None)
    assert len(prefixes._had) == 6
    assert [prefixes.find(chain).decodes for chain in chains] == [{D2: 64, D1: 64}, {D1: 32}, {D1: 64}, {D1: 32}]
    prefixes.note([], D1, None)
    assert len(prefixes._had) == 6, "a prompt shorter than a block"


def test_a_common_beginning_is_known_of_everybody_who_had_it_lately() -> None:
    prefixes, chain = Prefixes(), beginnings_of(prompt(40))
    caches = [WorkerCache((f"p{number}", "epoch")) for number in range(2)]
    for number in (*range(MOST_HOMES + 2), 5):
        prefixes.note(chain, (f"d{number}", "epoch"), caches[number % 2])
    near = prefixes.find(chain)
    earlier = [f"d{number}" for number in range(MOST_HOMES + 1, 1, -1) if number != 5]
    assert [address for address, _ in near.decodes] == ["d5", *earlier]
    assert [address for address, _ in near.prefills] == ["p1", "p0"]
    d1, d2, _ = (workers := idle_fleet("d1", "d2", "d3")).entries()
    d1.pending = 1
    both = Wishes(near=Near({d1.key: 32, d2.key: 32}))
    assert workers.choose("weights", 0.0, wishes=both) is d2, "of two that had it the less busy one"


def chosen(fleet: Fleet, near: list[tuple[Entry, int]]) -> Entry:
    entry = fleet.choose("weights", 0.0, wishes=Wishes(near=Near({entry.key: num_tokens for entry, num_tokens in near})))
    assert entry is not None
    return entry


@pytest.mark.parametrize(("num_tokens", "more"), [(32, 2), (512, 3), (1535, 4), (1536, 5), (3071, 7), (3072, 8), (100_000, 8)])
def test_a_longer_beginning_is_worth_more_waiting_up_to_eight_requests(num_tokens: int, more: int) -> None:
    d1, d2, d3 = (workers := idle_fleet("d1", "d2", "d3")).entries()
    d3.pending = 1
    d1.pending = more
    assert chosen(workers, near := [(d1, num_tokens)]) is d1
    d1.pending = more + 1
    assert chosen(workers, near) is d2
    d1.pending, d2.pending, d3.pending = 10 + more, 8, 8
    assert chosen(workers, near) is d1
    d1.pending += 1
    assert chosen(workers, near) is not d1
    d1.suspect_until_s, d1.pending = 1.0, 0
    assert chosen(workers, near) is not d1, "it failed lately"


def test_of_workers_that_are_not_much_busier_the_one_that_had_most_is_chosen() -> None:
    d1, d2, d3 = (workers := idle_fleet("d1", "d2", "d3")).entries()
    near = [(d1, 640), (d2, 320), (d3, 320)]
    d1.pending, d2.pending = 3, 2
    assert chosen(workers, near) is d1
    d1.pending = 4
    assert chosen(workers, near) is d3


@pytest.mark.parametrize("flaw", ["failed lately", "fell silent", "is too short", "is lonely"])
def test_an_idle_worker_that_is_not_to_be_chosen_makes_the_others_no_busier(flaw: str) -> None:
    d1, d2, d3 = (workers := idle_fleet("d1", "d2", "d3")).entries()
    d1.pending, d2.pending = 20, 19
    options: dict[str, Any] = {"near": Near({d1.key: 640})}
    match flaw:
        case "failed lately":
            d3.suspect_until_s = 1.0
        case "fell silent":
            workers.tell_quiet(d3, True, 0.0)
        case "is too short":
            d3.member, options["num_tokens"] = member(d3.member, max_model_len=500), 800
        case _:
            workers.register(replace(d1.member, address="p1", role=Role.PREFILL), 0.0)
            d3.member = member(d3.member, fingerprint="other weights")
    assert workers.choose(None, 0.0, wishes=Wishes(**options)) is d1


def test_what_is_remembered_of_a_worker_is_one_object() -> None:
    """A quarter of a million beginnings, each with 32 workers of either role, took 1.1 GB, and take a third of that."""
    (d1,) = idle_fleet("d1").entries()
    (prefixes := Prefixes()).note(chain := beginnings_of(prompt(40)), d1.key, d1.cache)
    near = prefixes.find(chain)
    assert all(key is d1.key for had in (near.decodes, near.prefills) for key in had)


def test_another_process_at_the_address_is_not_near() -> None:
    d1, d2 = (workers := idle_fleet("d1", "d2")).entries()
    d1.pending = 1
    assert workers.choose("weights", 0.0, wishes=Wishes(near=Near({("d1", "an earlier epoch"): 64}))) is d2


def test_a_prefill_worker_may_have_as_many_tokens_more_to_compute_as_it_has_cached() -> None:
    _, p1, p2 = (workers := prefill_fleet()).entries()
    near = Near({}, {p1.key: Kept(640), p2.key: Kept(64)})
    p1.pending_tokens = 575
    assert workers.prefill_peers("f", ANY_REQUEST, near)[0] is p1
    p1.pending_tokens = 577
    assert [peer.member.address for peer in workers.prefill_peers("f", ANY_REQUEST, near)] == ["p2", "p1", "p0"]
    p1.pending_tokens, p1.pending_cached = 2000, 1500
    assert workers.prefill_peers("f", ANY_REQUEST, near)[0] is p1, (
        "what it has cached of those that wait is not computed either"
    )


def turn(chat: int, number: int) -> EngineRequest:
    """The prompt of a turn begins with that of the one before."""
    text = tuple(prompt(*(64 + 7 * chat + i for i in range(number + 1))))
    return request(f"chat-{chat}/{number}", prompt=text, sampling=SamplingParams(max_tokens=2))


def test_the_turns_of_a_chat_stay_on_their_workers_beside_other_requests() -> None:
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        workers = await fleet(
            *(FakeWorker(where) for _ in range(3)), *(FakeWorker(where, Role.PREFILL) for _ in range(3)), router=router
        )
        await until(lambda: len(router.engine.workers.members()) == 6)
        for chat in range(4):
            await collect(router, turn(chat, 0))
        homes = {seen.request_id[:6]: (worker, seen.prefill_peers[0]) for worker in workers for seen in worker.engine.seen}
        for number in range(1, 6):
            beside = []
            for chat in range(4):
                home, _ = homes[f"chat-{chat}"]
                long = request(f"long-{number}-{chat}", prompt=(chat, number), sampling=SamplingParams(max_tokens=3))
                beside.append(asyncio.create_task(collect(router, long)))
                await until(
                    lambda name=long.request_id: any(name == seen.request_id for w in workers for seen in w.engine.seen)
                )
                await collect(router, asked := turn(chat, number))
                assert home.engine.seen[-1].request_id == asked.request_id
                assert home.engine.seen[-1].prefill_peers[0] == homes[f"chat-{chat}"][1]
            await asyncio.gather(*beside)
        await stop(router, *workers)

    run_quiet(body())
