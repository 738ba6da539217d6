"""How many deaths a request and how many replays a fleet may cost, and what its client is told when they are spent."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.errors import HandoffLost, RequestError, Unavailable
from jdisagg.core.requests import Output
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.wire.rig import request, run_quiet, until


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
        assert outputs[-1].error.message.endswith("; not tried again, and it and its prompt are refused here for 60 s")
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
        router = await Router(config).start()
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


def test_deaths_fail_only_requests_that_saw_two_of_them():
    async def body() -> None:
        router = await Router().start()
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
