"""Workers of one model whose contexts differ, as their pools do: a request goes where it fits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.errors import ContextLengthExceeded, Unavailable
from jdisagg.core.fleet import Load, Report
from jdisagg.core.requests import EngineRequest, FinishReason, Role, SamplingParams
from jdisagg.router import longest
from jdisagg.router.fleet import Fleet
from jdisagg.router.fleet_gauges import count_draining
from jdisagg.router.longest import AWAY_S
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import collect, entry_at
from tests.unit.wire.rig import FAST, member, request, run_quiet, until

STEADY = replace(FAST, dead_after_s=30.0)  # no error says that a worker fell silent, where this process is starved


def ask(request_id: str, max_tokens: int) -> EngineRequest:
    return request(request_id, prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens))


def test_a_request_goes_to_workers_that_hold_it_and_the_model_is_as_long_as_the_longest_that_decodes() -> None:
    async def body() -> None:
        router = await Router().start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        prefill = [await FakeWorker((router.address,), Role.PREFILL, max_model_len=length).start() for length in (2, 300)]
        await until(lambda: router.linked() == 2 and len(router.engine.workers.members()) == 4)
        assert router.engine.card.max_model_len == 90
        asked = [ask(f"r{number}", max_tokens=60) for number in range(6)]
        for one, outputs in zip(asked, await asyncio.gather(*(collect(router, one) for one in asked)), strict=True):
            assert [token for output in outputs for token in output.token_ids] == expected(one)
        assert short.engine.seen == []
        assert {seen.prefill_peers for seen in long.engine.seen} == {(prefill[1].address,)}
        for worker in (short, long, *prefill):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_stream_waits_for_a_worker_that_holds_it_rather_than_break_on_a_shorter_one() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        task = asyncio.create_task(collect(router, asked := ask("r1", max_tokens=80)))
        await until(lambda: long.engine.live)
        await long.die()
        await until(lambda: router.linked() == 1)
        with pytest.raises(Unavailable, match=r"holds 83 tokens \(at most 50\)"):
            await collect(router, ask("r2", max_tokens=80))
        again = await FakeWorker((router.address,), max_model_len=90).start()
        assert [token for output in await task for token in output.token_ids] == expected(asked)
        assert short.engine.seen == []
        for worker in (short, again):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_request_waits_for_a_prefill_worker_that_holds_it_rather_than_be_refused_by_a_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3), STEADY).start()
        decode = await FakeWorker((router.address,), config=STEADY, needs_prefill=True, max_model_len=90).start()
        short, long = [await FakeWorker((router.address,), Role.PREFILL, max_model_len=length).start() for length in (3, 90)]
        fleet = router.engine.workers.fleet
        await until(lambda: router.linked() == 1 and len(fleet.members()) == 3)
        long.draining = True
        await until(lambda: count_draining(fleet, Role.PREFILL) == 1)
        await long.die()
        with pytest.raises(Unavailable, match=r"no prefill worker holds 4 tokens \(at most 3; --local-prefill never\); waited"):
            await collect(router, ask("r1", max_tokens=80))
        monkeypatch.setattr(router.engine._replays, "_config", ReplayConfig(place_wait_s=60.0))
        task = asyncio.create_task(collect(router, asked := ask("r2", max_tokens=80)))
        await asyncio.sleep(0.1)
        again = await FakeWorker((router.address,), Role.PREFILL, max_model_len=90).start()
        assert [token for output in await task for token in output.token_ids] == expected(asked)
        assert {seen.prefill_peers for seen in decode.engine.seen} == {(again.address,)}
        for worker in (decode, short, again):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_prompt_that_nobody_was_there_to_compute_for_a_minute_is_its_clients_fault_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=60.0), STEADY).start()
        decode = await FakeWorker((router.address,), config=STEADY, needs_prefill=True, max_model_len=90).start()
        short = await FakeWorker((router.address,), Role.PREFILL, max_model_len=3).start()
        await until(lambda: router.linked() == 1 and len(router.engine.workers.fleet.members()) == 2)
        asked = asyncio.create_task(collect(router, ask("r1", max_tokens=80)))
        await asyncio.sleep(0.3)
        assert not asked.done(), "a longer one may have been there before this router"
        monkeypatch.setattr(longest, "AWAY_S", 0.1)
        with pytest.raises(
            ContextLengthExceeded, match=r"at most 2 tokens, but this one has 3: .* more than 3 \(--max-model-len"
        ):
            await asked
        with pytest.raises(ContextLengthExceeded):
            await collect(router, ask("r3", max_tokens=80))
        (said,) = [record.getMessage() for record in caplog.records if record.name == "jdisagg.router.placement"]
        assert said.startswith("request r1: a prompt may have at most 2 tokens"), "once a minute, to whoever runs the workers"
        allowed = replace(ask("r2", max_tokens=80), prompt_token_ids=(1, 2))
        assert [token for output in await collect(router, allowed) for token in output.token_ids] == expected(allowed)
        for worker in (decode, short):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_how_long_prompts_may_be_is_known_after_a_minute_and_forgotten_a_minute_after_who_took_them() -> None:
    found = Fleet(dead_after_s=1.0)
    for length in (50, 90):
        found.register(member(role=Role.PREFILL, address=f"h:{length}", max_model_len=length), 10.0)
    for length, needs_prefill in ((200, True), (40, False)):
        found.register(member(address=f"h:{length}", max_model_len=length, needs_prefill=needs_prefill), 10.0)
    found.evict(10.0)
    assert found.most_prefill_tokens(10.0 + AWAY_S - 0.1) is None
    assert found.most_prefill_tokens(10.0 + AWAY_S) == 90
    long = entry_at(found, "h:90")
    found.remove(long)
    short = entry_at(found, "h:50")
    for after_s, most in ((0.9, 90), (AWAY_S - 0.1, 90), (AWAY_S, 50)):
        short.last_seen_s = 10.0 + after_s
        found.evict(10.0 + after_s)
        assert found.most_prefill_tokens(10.0 + AWAY_S) == most
    found.remove(short)
    found.evict(10.0 + 2 * AWAY_S)
    found.register(member(address="h:40", max_model_len=40), 200.0)
    found.evict(200.0)
    assert found.most_prefill_tokens(200.0) == 40, "a decode worker that computes prompts counts, too"


def test_a_model_is_as_long_as_the_longest_worker_that_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "AWAY_S", 0.0)

    async def body() -> None:
        router = await Router().start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        long.draining = True
        await long.announce()
        assert router.engine.card.max_model_len == 50  # an answer of no stated length has a place while the other one drains
        short.draining = True
        await short.announce()
        assert router.engine.card.max_model_len == 90
        for worker in (short, long):
            await worker.die()
        await router.stop()

    run_quiet(body())


def test_a_worker_that_left_a_moment_ago_counts_for_the_length_of_its_model_and_no_other() -> None:
    found = Fleet(dead_after_s=1.0)
    short, long = (member(address=f"h:{length}", max_model_len=length) for length in (50, 90))
    for described in (short, long):
        found.register(described, 10.0)
    assert found.longest(10.0) == long
    for now_s in (10.5, 11.4, 11.6):
        found.heartbeat(short.address, short.epoch, Report(Load()), now_s)
        found.evict(now_s)
    assert found.members() == [short]
    assert found.longest(11.6) == long, "its requests wait for it"
    assert found.longest(10.5 + AWAY_S) == long
    assert found.longest(11.4 + AWAY_S) == short
    other = member(short, address="h:1", name="other", max_model_len=70)
    found.register(other, 80.0)
    assert found.longest(80.0) == other
    found.remove(found.entries()[1])
    assert found.longest(80.1) == short, "nobody waits for another model"
    found.remove(found.entries()[0])
    assert found.longest(80.2) is None


def test_a_prefill_worker_says_neither_how_the_model_is_called_nor_how_long_it_is() -> None:
    async def body() -> None:
        router = await Router().start()
        prefill = await FakeWorker((router.address,), Role.PREFILL, name="/data/m", max_model_len=300).start()
        await until(lambda: len(router.engine.workers.members()) == 1)
        with pytest.raises(Unavailable, match=r"no worker that decodes has registered"):
            _ = router.engine.card
        decode = await FakeWorker((router.address,), name="m", max_model_len=90).start()
        await until(lambda: router.linked() == 1)
        assert (router.engine.card.name, router.engine.card.max_model_len) == ("m", 90)
        await decode.die()
        await until(lambda: [one.address for one in router.engine.workers.members()] == [prefill.address])
        assert (router.engine.card.name, router.engine.card.max_model_len) == ("m", 90)
        await prefill.die()
        await router.stop()

    run_quiet(body())


def test_an_answer_of_no_stated_length_goes_on_where_less_of_it_fits() -> None:
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        short, long = [await FakeWorker((router.address,), max_model_len=length).start() for length in (50, 90)]
        await until(lambda: router.linked() == 2)
        asked = [replace(ask(f"r{number}", max_tokens=87), fills_context=True) for number in range(2)]
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: len(long.engine.live) == 2)
        assert short.engine.seen == [], "while there is one that holds all of it"
        await until(lambda: all(len(tokens) > 2 for _, _, tokens in long.engine.live.values()))
        await long.die()
        for one, task in zip(asked, tasks, strict=True):
            outputs = await task
            assert [token for output in outputs for token in output.token_ids] == expected(one)[:47]
            assert (outputs[-1].finish, outputs[-1].error) == (FinishReason.LENGTH, None)
        assert {seen.sampling.max_tokens for seen in short.engine.seen} == {47}
        least = replace(asked[0], request_id="r3", sampling=SamplingParams(max_tokens=87, min_tokens=48))
        with pytest.raises(Unavailable, match=r"holds 51 tokens \(at most 50\)"):
            await collect(router, least)
        await short.die()
        await router.stop()

    run_quiet(body())
