"""A request that is given back goes round: everybody is asked once before anybody is asked again."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import HandoffLost, Overloaded, RequestError, Unavailable
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop
from tests.unit.wire.rig import run_quiet


@pytest.mark.parametrize("error", [HandoffLost("every rung failed"), Unavailable("it drains")])
def test_nobody_is_asked_twice_before_everybody_was_asked_once(error: RequestError) -> None:
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(4)), router=router)
        for worker in workers:
            worker.engine.refusals = [error]
        assert_whole(asked := ask("r1", max_tokens=4), await collect(router, asked))
        assert sorted(len(worker.engine.seen) for worker in workers) == [1, 1, 1, 2]
        attempts = sorted(request.attempt for worker in workers for request in worker.engine.seen)
        assert attempts == [0, 1, 2, 3, 4]
        await stop(router, *workers)

    run_quiet(body())


def test_a_full_fleet_was_asked_once_each_and_says_so_at_once() -> None:
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(4)), router=router)
        for number, worker in enumerate(workers):
            worker.engine.refuse = Overloaded("full", retry_after_s=3.0 + number)
        (output,) = await collect(router, ask("r1"))
        assert isinstance(output.error, Overloaded)
        assert output.error.retry_after_s == 3.0
        assert [len(worker.engine.seen) for worker in workers] == [1, 1, 1, 1]
        assert {request.num_asked for worker in workers for request in worker.engine.seen} == {4}
        await stop(router, *workers)

    run_quiet(body())
