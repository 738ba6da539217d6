"""A prompt that begins as an earlier one did meets the caches of the workers that had it, unless those are too busy."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.requests import EngineRequest, Role, SamplingParams
from jdisagg.router import prefixes
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import NEAR_EXTRA, Fleet
from jdisagg.router.prefixes import BLOCK_TOKENS, MOST_HOMES, Near, Prefixes, beginnings_of
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.test_busy_workers import prefill_fleet
from tests.unit.router.test_fleet_engine import collect, fleet, stop
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.wire.rig import request, run_quiet, until

D1, D2, P1 = ("d1", "epoch"), ("d2", "epoch"), ("p1", "epoch")


def prompt(*lengths: int) -> list[int]:
    """Parts of their own of those lengths: equal leading lengths are equal beginnings."""
    return [1000 * length + i for length in lengths for i in range(length)]


def test_the_longest_known_beginning_in_whole_blocks_counts() -> None:
    prefixes = Prefixes()
    prefixes.note(beginnings_of(prompt(70)), D1, P1)
    prefixes.note(beginnings_of(prompt(70, 80)), D2, None)
    assert prefixes.find(beginnings_of(prompt(70, 90))) == Near((D1,), (P1,), 64)
    assert prefixes.find(beginnings_of(prompt(70, 80, 33))) == Near((D2,), (), 128)
    assert prefixes.find(beginnings_of(prompt(70)[:64])) == Near((D1,), (P1,), 64)
    for unknown in (prompt(31), prompt(63), prompt(70)[1:], []):
        assert prefixes.find(beginnings_of(unknown)) == Near()


def test_a_block_counts_only_behind_the_same_ones() -> None:
    one, other = beginnings_of(prompt(32, 32)), beginnings_of(list(reversed(prompt(32, 32))))
    assert len(set(one + other)) == 4
    assert beginnings_of(prompt(32, 32, 40))[:2] == one
    assert not set(one) & set(beginnings_of(prompt(32, 32), "another tenant's"))


def test_choices_of_one_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[tuple[object, str]] = []

    def counted(token_ids: tuple[int, ...], cache_salt: str) -> list[bytes]:
        hashed.append((token_ids, cache_salt))
        return beginnings_of(token_ids, cache_salt)

    monkeypatch.setattr(prefixes, "beginnings_of", counted)
    one, other = tuple(prompt(70)), tuple(prompt(70, 80))

    async def check() -> None:
        router = await Router().start()
        workers = await fleet(FakeWorker((router.address,)), router=router)
        asked = [(one, "")] * 3 + [(other, "")] * 2 + [(other, "salt"), (one, "")]
        await asyncio.gather(
            *(
                collect(router, request(f"r/{number}", prompt=ids, cache_salt=salt, sampling=SamplingParams(max_tokens=2)))
                for number, (ids, salt) in enumerate(asked)
            )
        )
        await stop(router, *workers)

    run_quiet(check())
    assert hashed == [(one, ""), (other, ""), (other, "salt"), (one, "")]


def test_so_many_prompts_are_remembered_and_the_oldest_are_forgotten() -> None:
    prefixes = Prefixes(most_prompts=3)
    chains = [beginnings_of([number] * BLOCK_TOKENS) for number in range(4)]
    for chain in chains[:3]:
        prefixes.note(chain, D1, None)
    prefixes.note(chains[0], D2, None)  # again: now the latest
    prefixes.find(chains[1])  # asked for, too
    prefixes.note(chains[3], D1, None)
    assert len(prefixes) == 3
    assert [prefixes.find(chain).decodes for chain in chains] == [(D2, D1), (D1,), (), (D1,)]
    prefixes.note([], D1, None)
    assert len(prefixes) == 3, "a prompt shorter than a block"


def test_a_common_beginning_is_known_of_everybody_who_had_it_lately() -> None:
    prefixes, chain = Prefixes(), beginnings_of(prompt(40))
    for number in (*range(MOST_HOMES + 2), 5):
        prefixes.note(chain, (f"d{number}", "epoch"), (f"p{number % 2}", "epoch"))
    near = prefixes.find(chain)
    assert [address for address, _ in near.decodes] == ["d5", "d9", "d8", "d7", "d6", "d4", "d3", "d2"]
    assert [address for address, _ in near.prefills] == ["p1", "p0"]
    d1, d2, _ = (workers := idle_fleet("d1", "d2", "d3")).entries()
    d1.pending = 1
    assert workers.choose("weights", 0.0, near=(d1.key, d2.key)) is d2, "of two that had it the less busy one"


def chosen(fleet: Fleet, near: Entry) -> Entry:
    entry = fleet.choose("weights", 0.0, near=(near.key,))
    assert entry is not None
    return entry


def test_the_near_worker_is_chosen_while_it_is_not_much_busier() -> None:
    d1, d2, d3 = (workers := idle_fleet("d1", "d2", "d3")).entries()
    d1.pending, d2.pending, d3.pending = int(NEAR_EXTRA), 0, 1
    assert chosen(workers, d1) is d1
    d1.pending += 1
    assert chosen(workers, d1) is d2
    d1.pending, d2.pending, d3.pending = 12, 8, 8
    assert chosen(workers, d1) is d1
    d1.pending = 13
    assert chosen(workers, d1) is not d1
    d1.suspect_until_s, d1.pending = 1.0, 0
    assert chosen(workers, d1) is not d1, "it failed lately"


def test_another_process_at_the_address_is_not_near() -> None:
    d1, d2 = (workers := idle_fleet("d1", "d2")).entries()
    d1.pending = 1
    assert workers.choose("weights", 0.0, near=(("d1", "an earlier epoch"),)) is d2


def test_a_prefill_worker_may_have_as_many_tokens_more_to_compute_as_it_has_cached() -> None:
    _, p1, _ = (workers := prefill_fleet()).entries()
    near = Near((), (p1.key,), 640)
    p1.pending_tokens = 639
    assert workers.prefill_peers("f", 1, near)[0] is p1
    p1.pending_tokens = 641
    assert workers.prefill_peers("f", 1, near)[-1] is p1


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
