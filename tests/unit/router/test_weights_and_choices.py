"""Several choices of one request, and fleets of two weights: one answer is from one set of weights, whatever dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import cast

import pytest

from jdisagg.api.generation.token_engine import Enough
from jdisagg.core.errors import HandoffLost, Overloaded, RequestError
from jdisagg.core.requests import EngineRequest, Output, Role, SamplingParams
from jdisagg.router.flight import Flight
from jdisagg.router.homes import Home
from jdisagg.router.placement import Placement
from jdisagg.router.recovery import ReplayConfig
from jdisagg.router.workers import Workers
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.router.test_idle_fleet import idle_fleet
from tests.unit.wire.rig import request, run_quiet, until


def choices(name: str, n: int, max_tokens: int) -> list[EngineRequest]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [request(f"{name}/{i}", prompt=(7, 2, 3), sampling=sampling, choice=i, fork_group=name) for i in range(n)]


def test_a_prompt_with_several_choices_is_quarantined_after_two_deaths_not_after_one_that_all_choices_saw():
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        asked = choices("r", 3, 5000)
        tasks = [asyncio.create_task(collect(router, one)) for one in asked]
        for death in (1, 2):
            await until(lambda: any(len(worker.engine.live) == 3 for worker in workers))
            assert router.engine._replays.num_quarantined(monotonic()) == 0
            victim = next(worker for worker in workers if worker.engine.live)
            workers.remove(victim)
            await victim.die()
            assert death == 2 or not any(task.done() for task in tasks)
        ends = [(await task)[-1] for task in tasks]
        assert all(isinstance(end.error, HandoffLost) for end in ends)
        assert router.engine._replays.num_quarantined(monotonic()) == 4  # three ids, one prompt
        (survivor,) = workers
        for again in (asked[2], replace(asked[0], request_id="other/0", fork_group="other")):
            with pytest.raises(HandoffLost, match="quarantined for"):
                await collect(router, again)
        assert not survivor.engine.seen
        assert_whole(fine := ask("r8"), await collect(router, fine))

        port = int(router.address.rpartition(":")[2])
        await router.stop()
        again = await Router().start(port)  # a new router knows of no deaths
        await until(lambda: again.linked() == 1)
        assert (await again.engine.debug_state())["quarantined"] == 0
        short = replace(asked[0], sampling=SamplingParams(max_tokens=4))
        assert_whole(short, await collect(again, short))
        await stop(again, survivor)

    run_quiet(body())


def test_a_choice_that_has_said_nothing_moves_to_the_weights_its_siblings_speak():
    async def body() -> None:
        router = await Router().start()
        old = FakeWorker((router.address,), fingerprint="weights-1")
        new = FakeWorker((router.address,), fingerprint="weights-2")
        await fleet(old, router=router)
        old.engine.frozen = True  # both choices are there and silent
        first, second = choices("r", 2, 30)
        outputs: dict[str, list[Output]] = {first.request_id: [], second.request_id: []}
        tasks = [asyncio.create_task(collect(router, one, outputs[one.request_id])) for one in (first, second)]
        await until(lambda: len(old.engine.live) == 2)
        await new.start()
        await until(lambda: router.linked() == 2)
        sink = old.engine.live[first.request_id][1]
        old.engine.cancel(first.request_id, 0, sink)
        sink([old.engine._end(first, HandoffLost("gave it back"))])
        await until(lambda: tokens(outputs[first.request_id]))  # the new weights answer the first choice ..
        assert [seen.request_id for seen in new.engine.seen] == [first.request_id]
        old.engine.frozen = False  # .. so what the old ones say of the second comes too late
        await asyncio.gather(*tasks)
        assert_whole(first, outputs[first.request_id])
        assert_whole(second, outputs[second.request_id])
        assert [seen.request_id for seen in new.engine.seen] == [first.request_id, second.request_id]
        assert new.engine.seen[-1].generated_token_ids == ()
        assert not router.engine._placement._homes
        await stop(router, old, new)

    run_quiet(body())


def test_a_decode_worker_with_prefill_workers_of_its_weights_is_preferred():
    async def body() -> None:
        router = await Router().start()
        where = (router.address,)
        lonely = FakeWorker(where, fingerprint="weights-1")
        d, p = FakeWorker(where, fingerprint="weights-2"), FakeWorker(where, Role.PREFILL, fingerprint="weights-2")
        await fleet(lonely, d, p, router=router)
        await until(lambda: len(router.engine.workers.members()) == 3)
        await asyncio.gather(*(collect(router, ask(f"r{i}")) for i in range(4)))
        assert not lonely.engine.seen
        await d.die()
        assert_whole(asked := ask("r9"), await collect(router, asked))
        assert len(lonely.engine.seen) == 1
        await p.die()
        await stop(router, lonely)

    run_quiet(body())


def test_a_stream_goes_on_only_where_it_would_end_by_the_same_tokens() -> None:
    async def body() -> None:
        router = await Router().start()
        first, other = (FakeWorker((router.address,), eos_token_ids=ids) for ids in ((2, 7), (2,)))
        await fleet(first, router=router)
        outputs: list[Output] = []
        task = asyncio.create_task(collect(router, asked := ask("r1", max_tokens=400), outputs))
        await until(lambda: tokens(outputs))
        first.engine.frozen = True
        await other.start()
        await until(lambda: router.linked() == 2)
        await first.die()
        new = ask("r2")  # of which nobody has heard anything
        assert_whole(new, await collect(router, new))
        assert [seen.request_id for seen in other.engine.seen] == ["r2"]
        alike = await FakeWorker((router.address,), eos_token_ids=(7, 2, 7)).start()
        await task
        assert_whole(asked, outputs)
        assert [seen.request_id for seen in alike.engine.seen] == ["r1"]
        assert {output.fingerprint for output in outputs} == {first.fingerprint}
        await stop(router, other, alike)

    run_quiet(body())


def test_a_group_that_has_spoken_keeps_its_weights() -> None:
    home = Home()
    home.settle("a:1", "weights-1")
    assert home.spoken_answers is None
    home.settle("b:1", "weights-2")  # nobody has heard anything yet
    assert not home.speak("weights-1")
    assert home.spoken_answers is None
    assert home.speak("weights-2")
    assert not home.speak("weights-1")
    assert home.spoken_answers == "weights-2"
    with pytest.raises(AssertionError):
        home.settle("a:1", "weights-1")


def test_a_group_has_one_home_for_as_long_as_somebody_holds_it_and_a_request_alone_one_of_its_own() -> None:
    placement = Placement(cast(Workers, SimpleNamespace(fleet=None)))

    def begun(group: str) -> Flight:
        placement.begin(flight := Flight(replace(request("r"), fork_group=group)))
        return flight

    first, second, other = begun("g"), begun("g"), begun("h")
    assert first.home is second.home is not other.home
    del first
    assert begun("g").home is second.home
    del second, other
    assert not placement._homes
    assert begun("").home is not begun("").home


@pytest.mark.parametrize(("error", "reason"), [(Overloaded("full"), "overloaded"), (RequestError("broken"), "error")])
def test_every_end_of_a_request_has_its_reason(error, reason):
    async def body() -> None:
        router = await Router(ReplayConfig(place_wait_s=0.05)).start()

        def count(label: str) -> float:
            return router.metrics.requests.finished.labels(reason=label)._value.get()

        with pytest.raises(RequestError):
            await collect(router, ask("r1"))
        with pytest.raises(RequestError):
            await collect(router, ask("r1", left_s=0.01))
        assert (count("unavailable"), count("deadline")) == (1, 1)
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.refuse = error
        assert (await collect(router, ask("r2")))[-1].error is not None
        assert count(reason) == 1
        worker.engine.refuse = None
        task = asyncio.create_task(collect(router, ask("r3", max_tokens=5000)))
        await until(lambda: worker.engine.live)
        with pytest.raises(RequestError):
            await collect(router, ask("r3"))
        assert count("invalid") == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert count("abort") == 1
        assert_whole(asked := ask("r4"), await collect(router, asked))
        assert count("length") == 1
        assert count("error") == (reason == "error")
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.parametrize(("enough", "reason"), [(True, "stop"), (False, "abort")])
def test_workers_hear_whether_a_client_left_or_had_enough(enough: bool, reason: str) -> None:
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        outputs = router.engine.generate(ask("r1", max_tokens=5000))
        await anext(outputs)
        if enough:
            with pytest.raises(Enough):
                await outputs.athrow(Enough())
        else:
            await outputs.aclose()
        await until(lambda: not worker.engine.live)
        assert worker.engine.had_enough == (["r1"] if enough else [])
        assert router.metrics.requests.finished.labels(reason=reason)._value.get() == 1
        await stop(router, worker)

    run_quiet(body())


@pytest.mark.parametrize(("group", "chosen"), [("", "a:1"), ("g", "b:1")])
def test_a_request_without_siblings_that_everybody_failed_goes_to_the_least_busy_and_not_where_it_failed_last(
    group: str, chosen: str
) -> None:
    there = idle_fleet("a:1", "b:1")
    workers = SimpleNamespace(fleet=there, submit=lambda *_: None, cancel=lambda *_, **__: None)
    placement, flight = Placement(cast(Workers, workers)), Flight(replace(ask("r1"), fork_group=group))
    placement.begin(flight)
    for tried in ({"b:1"}, {"a:1"}):  # a, and then b
        flight.setbacks.tried = frozenset(tried)
        assert placement.place(flight, 0.0)
        placement.leave(flight)
        flight.replay()
    there.entries()[1].pending = 5
    flight.setbacks.tried = frozenset({"a:1", "b:1"})
    assert placement.place(flight, 0.0)
    assert flight.entry is not None
    assert flight.entry.member.address == chosen
