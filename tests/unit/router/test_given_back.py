"""A request that a worker gives back goes to another one, and only what its caller did wrong is not tried again."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, InvalidRequest, Overloaded, RequestError, Unavailable
from jdisagg.core.requests import FinishReason, Output
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.wire.rig import run_quiet, until


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
