"""Streams that survive their workers: every token once, in order, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from dataclasses import replace
from time import monotonic

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, Overloaded, RequestError, Unavailable
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role, SamplingParams
from jdisagg.router.prefixes import BLOCK_TOKENS
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.wire.rig import FAST, IMPATIENT, request, run_quiet, until


def ask(request_id: str, max_tokens: int = 40, **fields) -> EngineRequest:
    number = int(request_id.strip("rs"))
    return request(request_id, prompt=(number, 2, 3), sampling=SamplingParams(max_tokens=max_tokens), **fields)


async def collect(router: Router, asked: EngineRequest, outputs: list[Output] | None = None) -> list[Output]:
    outputs = [] if outputs is None else outputs
    async for output in router.engine.generate(asked):
        outputs.append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_whole(asked: EngineRequest, outputs: list[Output]) -> None:
    assert tokens(outputs) == expected(asked)
    assert [output.finish for output in outputs if output.finish] == [FinishReason.LENGTH]
    assert {output.attempt for output in outputs} == {asked.attempt}


async def fleet(*workers: FakeWorker, router: Router) -> list[FakeWorker]:
    for worker in workers:
        await worker.start()
    await until(lambda: router.linked() == sum(worker._role is not Role.PREFILL for worker in workers))
    return list(workers)


async def stop(router: Router, *workers: FakeWorker) -> None:
    for worker in workers:
        assert not worker.engine.live, "a request was left on a worker"
        await worker.die()
    assert not (await router.engine.debug_state())["flights"]
    assert all(entry.pending == entry.pending_tokens == 0 for entry in router.engine.workers.fleet.entries())
    await router.stop()


def test_a_request_runs_on_one_worker_with_an_ordered_list_of_prefill_peers():
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        p1, p2, d = FakeWorker(where, Role.PREFILL), FakeWorker(where, Role.PREFILL), FakeWorker(where)
        other = FakeWorker(where, Role.PREFILL, fingerprint="weights-2")
        await fleet(p1, p2, other, d, router=router)
        await until(lambda: len(router.engine.workers.members()) == 4)
        asked = ask("r1")
        assert_whole(asked, outputs := await collect(router, asked))
        assert set(d.engine.seen[0].prefill_peers) == {p1.address, p2.address}
        provenance = outputs[-1].provenance
        assert provenance is not None
        assert provenance.recoveries == ("refetch",)
        assert router.engine.card.vocab_size == 1000
        assert router.engine.health().ready
        workers = [f'jdisagg_workers{{role="{role}"}} {count}.0' for role, count in (("prefill", 3), ("decode", 1))]
        assert set(workers) <= set(router.metrics.text().splitlines())
        await stop(router, p1, p2, other, d)

    run_quiet(body())


def test_choices_of_one_request_go_to_one_worker_and_others_to_the_less_busy():
    async def body() -> None:
        router = await Router().start()
        workers = [FakeWorker((router.address,)) for _ in range(3)]
        await fleet(*workers, router=router)
        await until(lambda: len(router.engine.workers.members()) == 3)
        choices = [replace(ask(f"r{i}"), fork_group="r") for i in range(6)]
        alone = [ask(f"s{i}") for i in range(4)]
        await asyncio.gather(*(collect(router, asked) for asked in (*choices, *alone)))
        seen = [{request.request_id[0] for request in worker.engine.seen} for worker in workers]
        assert sum("r" in letters for letters in seen) == 1
        assert sum("s" in letters for letters in seen) >= 2
        assert not len(router.engine._placement)
        await stop(router, *workers)

    run_quiet(body())


@pytest.mark.parametrize("kill", ["die", "freeze"])
def test_a_stream_goes_on_exactly_when_its_worker_dies_or_stalls(kill, caplog):
    caplog.set_level(logging.INFO, logger="jdisagg")

    async def body() -> None:
        router = await Router().start()
        d1, d2 = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        asked = ask("r1")
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, asked, outputs))
        await until(lambda: len(tokens(outputs)) >= 5)
        victim, heir = (d1, d2) if d1.engine.live else (d2, d1)
        before = len(tokens(outputs))
        began_s = monotonic()
        if kill == "die":
            await victim.die()
        else:
            victim.engine.frozen = True
        assert await until(lambda: heir.engine.live) < 1.2
        await task
        lasted_s = monotonic() - began_s
        assert_whole(asked, outputs)
        assert len(heir.engine.seen[-1].generated_token_ids) >= before
        assert heir.engine.seen[-1].attempt == 1
        provenance = outputs[-1].provenance
        assert provenance is not None
        assert provenance.recoveries == ("replay", "refetch")
        assert router.replays() == 1
        (told,) = (record.getMessage() for record in caplog.records if "goes on" in record.getMessage())
        said = re.fullmatch(r"request r1: goes on (\d+\.\d\d) s after it was lost; attempt 1, worker (.+)", told)
        assert said
        assert float(said[1]) <= lasted_s + 0.01
        assert said[2] == f"fake @ {heir.address}"
        text = router.metrics.text().splitlines()
        assert "jdisagg_time_to_first_token_seconds_count 1.0" in text
        assert "jdisagg_inter_token_latency_seconds_count 39.0" in text  # the gap of the replay included
        assert 'jdisagg_requests_finished_total{reason="length"} 1.0' in text
        if kill == "freeze":
            await until(lambda: not victim.engine.live)  # its late outputs were dropped, its request cancelled
            victim.engine.frozen = False
            await until(lambda: router.linked() == 2)  # alive again: connected again
            await victim.die()
        await stop(router, heir)

    run_quiet(body())


def test_a_request_that_cannot_begin_leaves_nothing_behind():
    async def body() -> None:
        router = await Router().start()
        with pytest.raises(OverflowError):
            await collect(router, request("r1", prompt=(2**63,) * BLOCK_TOKENS, fork_group="r"))
        assert not (await router.engine.debug_state())["flights"]
        assert not router.engine._placement, "a group of siblings lives"
        await stop(router)

    run_quiet(body())


@pytest.mark.covers("X14")
def test_a_silent_worker_is_left_within_about_dead_after():
    async def body() -> None:
        router = await Router().start()
        mute = FakeWorker((router.address,), config=FAST.__class__(heartbeat_s=20.0, dead_after_s=60.0))
        (mute,) = await fleet(mute, router=router)
        mute.engine.frozen = True  # no outputs, no heartbeats: as after SIGSTOP
        asked = ask("r1")
        task = asyncio.create_task(collect(router, asked))
        took_s = await until(lambda: mute.engine.seen)
        heir = await FakeWorker((router.address,)).start()
        assert took_s + await until(lambda: heir.engine.seen) < 1.2
        assert_whole(asked, await task)
        await mute.die()
        await stop(router, heir)

    run_quiet(body())


@pytest.mark.parametrize("error", [HandoffLost("every rung failed"), Unavailable("draining"), Overloaded("queue is full")])
def test_a_request_given_back_moves_to_another_worker(error):
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        refusals = [error]
        for worker in workers:
            worker.engine.refusals = refusals
        asked = ask("r1")
        assert_whole(asked, await collect(router, asked))
        assert [len(worker.engine.seen) for worker in workers] == [1, 1]
        assert not refusals
        await stop(router, *workers)

    run_quiet(body())


def test_a_request_whose_worker_died_in_its_queue_asks_a_full_one_again():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        for worker in workers:
            worker.engine.frozen = True
        asked = ask("r1")
        task = asyncio.create_task(collect(router, asked))
        await until(lambda: any(worker.engine.live for worker in workers))
        victim = next(worker for worker in workers if worker.engine.live)
        (heir,) = (worker for worker in workers if worker is not victim)
        heir.engine.refusals = [Overloaded("12 requests are before it", retry_after_s=3.0) for _ in range(2)]
        heir.engine.frozen = False
        await victim.die()
        assert_whole(asked, await task)
        await stop(router, heir)

    run_quiet(body())


@pytest.mark.covers("X26")
def test_late_outputs_of_an_older_attempt_are_dropped():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        refusals: list[RequestError] = [HandoffLost("every rung failed")]
        for worker in workers:
            worker.engine.refusals = refusals
        asked = ask("r1", max_tokens=80)
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, asked, outputs))
        await until(lambda: len(tokens(outputs)) > 3)
        (former,) = (worker for worker in workers if not worker.engine.live)
        former.engine.say(Output(request_id="r1", attempt=0, token_ids=(999,)))
        former.engine.say(Output(request_id="r1", attempt=0, finish=FinishReason.ERROR, error=HandoffLost("late")))
        former.engine.say(Output(request_id="nobody", token_ids=(999,)))
        await task
        assert_whole(asked, outputs)
        await stop(router, *workers)

    run_quiet(body())


def test_a_request_given_back_by_everybody_goes_round_until_somebody_takes_it():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        first, *others = (entry.member.address for entry in router.engine.workers.fleet.entries())
        by_address = {worker.address: worker for worker in workers}
        by_address[others[1]].engine.refusals = [HandoffLost("no prefill worker")]
        for address in (first, others[0]):
            by_address[address].engine.refuse = HandoffLost("no prefill worker")
        asked = ask("r1")
        assert_whole(asked, await collect(router, asked))
        by_address[others[1]].engine.refuse = HandoffLost("no prefill worker")
        (output,) = await collect(router, ask("r2", left_s=1.0))
        assert isinstance(output.error, HandoffLost | DeadlineExceeded)
        await stop(router, *workers)

    run_quiet(body())


def test_errors_of_the_caller_are_not_retried(caplog):
    caplog.set_level("INFO", logger="jdisagg.router.recovery")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.refuse = InvalidRequest("top_p is 7", field="top_p")
        (output,) = await collect(router, ask("r1"))
        assert isinstance(output.error, InvalidRequest)
        assert output.error.field == "top_p"
        assert len(worker.engine.seen) == 1
        worker.engine.refuse = Overloaded("queue is full", retry_after_s=3.0)
        (output,) = await collect(router, ask("r2"))
        assert isinstance(output.error, Overloaded)  # nowhere else to go
        assert output.error.retry_after_s == 3.0
        assert "r2" not in caplog.text, "a line for every request that a full fleet refuses"
        await stop(router, worker)

    run_quiet(body())


def test_a_request_seen_at_two_deaths_is_aborted_and_quarantined(caplog):
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=5000), outputs))
        for _ in range(2):
            await until(lambda: any(worker.engine.live for worker in workers))
            victim = next(worker for worker in workers if worker.engine.live)
            workers.remove(victim)
            await victim.die()
        await task
        assert isinstance(outputs[-1].error, HandoffLost)
        assert "2 workers went down" in outputs[-1].error.message
        (told,) = [record.getMessage() for record in caplog.records if "not replayed; stage " in record.getMessage()]
        assert "in flight when 2 workers went down (last: " in told, "the log says why it is not tried again"
        (survivor,) = workers
        before = len(survivor.engine.seen)
        for again in (ask("r1"), request("other-id", prompt=(1, 2, 3))):  # the id, and the prompt
            with pytest.raises(HandoffLost, match="quarantined for"):
                await collect(router, again)
        assert len(survivor.engine.seen) == before
        assert "jdisagg_requests_quarantined_total 1.0" in router.metrics.text()
        assert_whole(asked := ask("r2"), await collect(router, asked))
        await stop(router, survivor)

    run_quiet(body())


def test_replays_are_budgeted_per_fleet(caplog):
    async def body() -> None:
        config = ReplayConfig(budget_floor=0, budget_share=0.0, max_deaths=9)
        router = await Router(config, step_timeout_s=60.0).start()
        d1, d2, d3 = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=400) for i in range(6)]
        results = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: all(len(d.engine.live) == 2 for d in (d1, d2, d3)))
        for d in (d1, d2, d3):
            d.engine.frozen = True  # nobody ends while they die
        await d1.die()  # 2 replays of 6 requests
        await until(lambda: len(d2.engine.live) + len(d3.engine.live) == 6)
        victim, heir = sorted((d2, d3), key=lambda d: -len(d.engine.live))
        num_struck = len(victim.engine.live)
        await victim.die()  # 3 more fit, or 4
        await until(lambda: len(heir.engine.live) == 6 or any(result.done() for result in results))
        await heir.die()  # 6 more do not
        again = await FakeWorker((router.address,)).start()
        ends = [(await result)[-1] for result in results]
        errors = [end.error for end in ends if end.error]
        assert len(errors) == 2 + num_struck
        assert all(isinstance(error, Unavailable) and "replay budget of 0 + " in error.message for error in errors)
        assert router.metrics.fleet.replays_refused._value.get() == len(errors)
        assert f'jdisagg_requests_finished_total{{reason="unavailable"}} {len(errors)}.0' in router.metrics.text()
        assert caplog.text.count("not replayed; stage ") == len(errors), "behind some tokens, or before the first"
        assert caplog.text.count("spent its replay budget of 0 + ") == len(errors), "the log says why"
        await stop(router, again)

    run_quiet(body())


def test_a_worker_that_did_nothing_costs_no_budget_one_that_lost_a_hand_off_does():
    async def body() -> None:
        router = await Router(ReplayConfig(budget_floor=0, budget_share=0.0)).start()
        d1, d2 = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        for number in range(6):
            d1.engine.refusals = [Unavailable("this worker is draining")]
            d2.engine.refusals = [Unavailable("no usable prefill worker")]
            assert_whole(asked := ask(f"r{number}", max_tokens=2), await collect(router, asked))
            d1.engine.refusals, d2.engine.refusals = [], []
        for number in (7, 8):  # one is alive at a time: one may be replayed
            both = [HandoffLost("every rung failed")]
            d1.engine.refusals = d2.engine.refusals = both  # whoever is asked first
            ended = (await collect(router, ask(f"r{number}", max_tokens=2)))[-1]
            assert isinstance(ended.error, Unavailable if number == 8 else type(None))
        await stop(router, d1, d2)

    run_quiet(body())


def test_without_a_worker_a_request_waits_a_little_then_fails_or_is_served():
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.3)).start()
        began_s = monotonic()
        with pytest.raises(Unavailable, match=r"no decode or unified worker .*; waited 0 s"):
            await collect(router, ask("r1"))
        assert 0.25 < monotonic() - began_s < 20.0
        with pytest.raises(DeadlineExceeded):
            await collect(router, ask("r2", left_s=0.1))
        assert not router.engine.health().ready
        await stop(router)
        router = await Router().start()
        task = asyncio.create_task(collect(router, asked := ask("r3")))
        worker = await FakeWorker((router.address,), Role.UNIFIED).start()
        assert_whole(asked, await task)
        assert worker.engine.seen[0].prefill_peers == ()
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.covers("X14")
def test_a_request_ends_at_its_deadline_even_when_the_worker_does_not():
    async def body() -> None:
        router = await Router(step_timeout_s=60.0).start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.frozen = True
        began_s = monotonic()
        (output,) = await collect(router, ask("r1", left_s=0.2))
        assert isinstance(output.error, DeadlineExceeded)
        assert 0.2 <= monotonic() - began_s < 20.0, "not before it"
        await until(lambda: not worker.engine.live)
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.covers("H10")
@pytest.mark.covers("X14")
def test_a_client_that_goes_away_frees_its_worker():
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        async with contextlib.aclosing(router.engine.generate(ask("r1", max_tokens=10_000))) as stream:
            async for _ in stream:
                break
        await until(lambda: not worker.engine.live)
        async with contextlib.aclosing(router.engine.generate(ask("r2", max_tokens=10_000))) as first:
            await anext(first)
            with pytest.raises(InvalidRequest, match="in use"):
                await collect(router, ask("r2"))
        await until(lambda: not worker.engine.live)
        await stop(router, worker)

    run_quiet(body())


def test_an_id_that_comes_again_gets_nothing_of_the_request_that_had_it_before():
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        async with contextlib.aclosing(router.engine.generate(ask("r1"))) as stream:
            await anext(stream)
        outputs: list[Output] = []
        again = asyncio.create_task(collect(router, ask("r1", max_tokens=12), outputs))
        await asyncio.sleep(0)  # it is on its way to the worker, behind the cancel of the first
        worker.engine.tick()  # which speaks once more
        await again
        assert tokens(outputs) == expected(ask("r1", max_tokens=12))
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.parametrize("state", ["waiting", "pausing", "running", "losing"])
def test_a_router_that_closes_tells_every_client_to_ask_another_one(state):
    async def body() -> None:
        router, outputs = await Router(ReplayConfig(place_wait_s=60.0)).start(), list[Output]()
        workers = [] if state == "waiting" else await fleet(FakeWorker((router.address,)), router=router)
        for worker in workers if state == "pausing" else ():
            worker.engine.refuse = Unavailable("it drains")
        asked = asyncio.create_task(collect(router, ask("r1", max_tokens=10_000), outputs))
        if state == "waiting":
            await until(lambda: router.engine._flights)
        elif state == "pausing":
            await until(lambda: len(workers[0].engine.seen) >= 2)
        else:
            await until(lambda: tokens(outputs))
        began_s = monotonic()
        if state == "losing":  # its worker, in the same moment
            router.engine._on_lost(router.engine.workers.fleet.entries()[0], "heartbeat")
        await router.stop()
        ended = (await asyncio.gather(asked, return_exceptions=True))[0]
        assert monotonic() - began_s < 25.0, "at once, not when it would have given up"
        error = ended if state == "waiting" else outputs[-1].error  # the one who was not admitted yet, and the others
        assert isinstance(error, Unavailable)
        assert "shutting down" in error.message
        for worker in workers:
            await worker.die()

    run_quiet(body())


def test_requests_stay_within_one_fingerprint_and_draining_workers_get_nothing_new():
    async def body() -> None:
        router = await Router(config=replace(FAST, worker_wait_s=0.3)).start()
        old = FakeWorker((router.address,), fingerprint="weights-1")
        new = FakeWorker((router.address,), fingerprint="weights-2")
        await fleet(old, new, router=router)
        new.draining = True
        await until(lambda: any(member.draining for member in router.engine.workers.members()))
        draining = [f'jdisagg_workers_draining{{role="{role}"}} {count}.0' for role, count in (("prefill", 0), ("decode", 1))]
        await until(lambda: set(draining) <= set(router.metrics.text().splitlines()))  # once it is connected
        assert router.engine.health().ready
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=5000), outputs))
        await until(lambda: tokens(outputs))
        assert not new.engine.seen
        new.draining = False
        await until(lambda: not any(member.draining for member in router.engine.workers.members()))
        await old.die()
        await task
        assert isinstance(outputs[-1].error, Unavailable)  # half its tokens are from other weights: it cannot go on
        assert not new.engine.seen
        assert_whole(asked := ask("r2"), await collect(router, asked))
        await stop(router, new)

    run_quiet(body())


def test_a_router_that_drains_says_once_for_whom_it_waits_and_takes_nobody_else(caplog):
    async def body() -> None:
        router = await Router().start()
        worker = FakeWorker((router.address,))
        await fleet(worker, router=router)
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=200), outputs))
        await until(lambda: tokens(outputs))
        drains = [asyncio.create_task(router.engine.drain(monotonic() + 30)) for _ in range(2)]
        await until(lambda: "draining" in caplog.text)
        with pytest.raises(Unavailable):
            await collect(router, ask("r2"))
        assert await asyncio.gather(*drains) == [0, 0]
        await task
        assert_whole(ask("r1", max_tokens=200), outputs)
        [line] = [r.getMessage() for r in caplog.records if "draining" in r.getMessage()]
        assert line == "draining: nothing more is admitted, 1 requests are waited for 30 s"
        await stop(router, worker)

    with caplog.at_level("INFO"):
        run_quiet(body())


@pytest.mark.parametrize("draining", [False, True])
def test_a_router_that_goes_is_one_short_line_and_none_while_the_worker_drains(draining, caplog):
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.draining = draining
        await until(lambda: worker.registration.registered()[router.address])
        caplog.clear()
        await router.stop()
        await until(lambda: not worker.registration.registered()[router.address])
        lines = [record.getMessage() for record in caplog.records if record.name == "jdisagg.api.fleet.client"]
        codes = ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED")  # between two heartbeats, or in the middle of one, a slow one
        gone = [[f"router {router.address} does not answer ({code}); registering again until it does"] for code in codes]
        assert lines in ([[]] if draining else gone)
        await worker.die()

    run_quiet(body())


def levels(caplog, logger: str, address: str) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == logger and address in record.getMessage()]


async def say_goodbye(router: Router, worker: FakeWorker) -> None:
    """It waits two heartbeats at most, which a machine may stand still for: here of a minute."""
    router.service._config = replace(FAST, heartbeat_s=60.0)
    router.service.leave()
    await router.service.everybody_told()
    assert router.service._told == {worker.address}
    await until(lambda: worker.registration._routers[router.address].is_leaving)


def test_a_router_that_says_goodbye_is_no_outage_and_the_next_one_at_its_address_may_be(caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        address = router.address
        await say_goodbye(router, worker)
        await router.stop()
        await until(lambda: not worker.registration.registered()[address])
        assert levels(caplog, "jdisagg.api.fleet.client", f"router {address} has stopped, as it said") == ["INFO"]
        again = await Router().start(int(address.rpartition(":")[2]))
        await until(lambda: again.linked() == 1)
        caplog.clear()
        await again.stop()
        await until(lambda: not worker.registration.registered()[address])
        assert levels(caplog, "jdisagg.api.fleet.client", f"router {address} does not answer") == ["WARNING"]
        await worker.die()

    run_quiet(body())


@pytest.mark.parametrize("draining", [False, True])
def test_a_router_that_never_answered_is_told_of_once_and_after_a_while(draining, caplog, monkeypatch):
    monkeypatch.setattr("jdisagg.api.fleet.client.UNHEARD_S", 0.5)

    async def body() -> None:
        router = await Router().start()
        nobody = "127.0.0.1:1"
        began_s = monotonic()
        worker = FakeWorker((router.address, nobody))
        worker.draining = draining
        await fleet(worker, router=router)

        def told() -> list[str]:
            return levels(caplog, "jdisagg.api.fleet.client", f"router {nobody} has not answered for")

        if not draining:
            await until(told)
            assert monotonic() - began_s >= 0.5
        await asyncio.sleep(0.8)  # three more attempts
        assert told() == ([] if draining else ["WARNING"])
        assert not levels(caplog, "jdisagg.api.fleet.client", f"router {router.address} has not answered")
        await stop(router, worker)

    run_quiet(body())


def test_a_goodbye_never_waits_for_a_worker_that_is_dead():
    async def body() -> None:
        router = await Router(config=replace(FAST, dead_after_s=60.0)).start()
        (worker,) = await fleet(FakeWorker((router.address,), Role.PREFILL), router=router)
        await until(router.engine.workers.members)
        await worker.die()
        router.service.leave()
        await router.service.everybody_told()
        assert router.engine.workers.members(), "it was not waited for until it was given up"
        await router.stop()

    run_quiet(body())


def test_a_router_that_said_that_it_ends_need_not_be_told_of_a_drain(caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        await say_goodbye(router, worker)
        await router._server.stop(0)
        worker.draining = True
        await worker.registration.announce()
        await stop(router, worker)

    run_quiet(body())
    assert not [record for record in caplog.records if "could not be told" in record.getMessage()]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("draining", [False, True])
def test_a_worker_that_drained_has_left_and_any_other_is_lost(draining, role, caplog):
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router(config=IMPATIENT).start()
        (worker,) = await fleet(FakeWorker((router.address,), role), router=router)
        await until(lambda: worker.registration.registered()[router.address])
        worker.draining = draining
        await worker.registration.announce()
        (entry,) = router.engine.workers.fleet.entries()
        assert entry.member.draining is draining
        await worker.die()
        await until(lambda: not router.engine.workers.members())
        wanted = f"{role.value} worker {entry.member.worker} " + ("has left" if draining else "is lost")
        assert levels(caplog, "jdisagg.router.workers", wanted) == ["INFO" if draining else "WARNING"]
        await router.stop()

    run_quiet(body())


def test_a_restarted_router_learns_its_fleet_and_its_workers_free_the_old_streams():
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        task = asyncio.create_task(collect(router, ask("r1", max_tokens=10_000)))
        await until(lambda: worker.engine.live)
        port = int(router.address.rpartition(":")[2])
        await router.stop()
        outputs = await task
        assert outputs[-1].error is not None
        await until(lambda: not worker.engine.live)
        again = await Router().start(port)
        await until(lambda: again.linked() == 1)
        assert_whole(asked := ask("r2"), await collect(again, asked))
        await stop(again, worker)

    run_quiet(body())


def test_least_loaded_worker_is_chosen():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=60) for i in range(12)]
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        await until(lambda: sum(len(worker.engine.live) for worker in workers) == 12)
        assert [len(worker.engine.live) for worker in workers] == [4, 4, 4]
        for one, task in zip(asked, tasks, strict=True):
            assert_whole(one, await task)
        await stop(router, *workers)

    run_quiet(body())


def test_two_hundred_streams_survive_random_deaths():
    async def body() -> None:
        chance = random.Random(7)
        router = await Router(ReplayConfig(max_deaths=6)).start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=chance.randint(20, 150)) for i in range(200)]

        async def one(item: EngineRequest) -> list[Output]:
            await asyncio.sleep(chance.random() * 0.5)
            return await collect(router, item)

        tasks = [asyncio.create_task(one(item)) for item in asked]
        for _ in range(4):
            await asyncio.sleep(0.25)
            victim = workers.pop(chance.randrange(len(workers)))
            await victim.die()
            workers.append(await FakeWorker((router.address,)).start(int(victim.address.rpartition(":")[2])))
        for item, task in zip(asked, tasks, strict=True):
            assert_whole(item, await task)
        assert router.replays() > 20
        await stop(router, *workers)

    run_quiet(body())


def test_deaths_fail_only_requests_that_saw_two_of_them():
    async def body() -> None:
        router = await Router(step_timeout_s=60.0).start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = [ask(f"r{i}", max_tokens=150) for i in range(60)]
        results: list[list[Output]] = [[] for _ in asked]
        tasks = [asyncio.create_task(collect(router, item, result)) for item, result in zip(asked, results, strict=True)]
        for worker in workers:
            worker.engine.frozen = True  # nobody ends before both are dead
        await until(lambda: sum(len(worker.engine.live) for worker in workers) == 60)
        for worker in workers:
            worker.engine.tick()
        await until(lambda: all(results))
        await workers[0].die()
        await until(lambda: len(workers[1].engine.live) + len(workers[2].engine.live) == 60)
        await workers[1].die()
        workers[2].engine.frozen = False
        await asyncio.gather(*tasks)
        aborted = 0
        for item, outputs in zip(asked, results, strict=True):
            error = outputs[-1].error
            assert error is None or isinstance(error, RequestError)
            if error is None:
                assert_whole(item, outputs)
            else:
                aborted += 1
                assert tokens(outputs) == expected(item)[: len(tokens(outputs))]
                assert error.grpc_status == "ABORTED"
        assert 5 <= aborted <= 15
        await stop(router, workers[2])

    run_quiet(body())


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ((-3,), r"sent token -3, wanted one of \[0, 1000\)"),
        ((1000,), r"sent token 1000, wanted one of \[0, 1000\)"),
        ((5,) * 41, "sent 41 tokens, wanted 40 at most"),
    ],
)
def test_tokens_that_no_worker_of_the_model_sends_are_not_delivered(
    odd: tuple[int, ...], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        router = await Router().start()
        liar, other = await fleet(FakeWorker((router.address,)), FakeWorker((router.address,)), router=router)
        liar.engine.frozen = other.engine.frozen = True
        task = asyncio.create_task(collect(router, asked := ask("r1")))
        await until(lambda: liar.engine.live or other.engine.live)
        if other.engine.live:
            liar, other = other, liar
        liar.engine.say(Output(request_id="r1", attempt=0, token_ids=odd))
        other.engine.frozen = False  # and not the liar, whose next token could travel with these
        assert_whole(asked, await task)
        assert [seen.generated_token_ids for seen in other.engine.seen] == [()]
        await stop(router, liar, other)

    run_quiet(body())
    assert re.search(rf"request r1: recovering by replay; .*{told}; take it, or", caplog.text)
