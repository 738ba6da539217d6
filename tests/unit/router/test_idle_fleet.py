"""A fleet with little to do: what begins alike meets its own cache, what does not is spread."""

from __future__ import annotations

import pytest

from jdisagg.core.requests import SamplingParams
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.test_fleet_engine import collect, fleet, stop
from tests.unit.wire.rig import request, run_quiet

pytestmark = pytest.mark.timeout(120)

FIRST_TURN = tuple(range(3, 40))


async def who_got(router: Router, workers: list[FakeWorker], name: str, prompt: tuple[int, ...]) -> FakeWorker:
    await collect(router, request(name, prompt=prompt, sampling=SamplingParams(max_tokens=1)))
    (worker,) = [worker for worker in workers if any(seen.request_id == name for seen in worker.engine.seen)]
    return worker


def test_a_chat_goes_on_where_it_was() -> None:
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        home = await who_got(router, workers, "turn0", FIRST_TURN)
        for turn in range(1, 4):
            await who_got(router, workers, f"other{turn}", (turn, *FIRST_TURN))
            longer = (*FIRST_TURN, *range(100, 100 + 20 * turn))
            assert await who_got(router, workers, f"turn{turn}", longer) is home
        away = next(worker for worker in workers if worker is not home)
        workers.remove(away)
        await away.die()
        assert await who_got(router, workers, "turn4", FIRST_TURN) is home, "whoever else goes"
        await stop(router, *workers)

    run_quiet(body())


def test_prompts_that_begin_unlike_are_spread() -> None:
    async def body() -> None:
        router = await Router().start()
        workers = await fleet(*(FakeWorker((router.address,)) for _ in range(3)), router=router)
        for number in range(60):
            await who_got(router, workers, f"r{number}", (number, *FIRST_TURN))
        assert min(len(worker.engine.seen) for worker in workers) >= 2
        await stop(router, *workers)

    run_quiet(body())
