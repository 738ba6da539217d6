"""A request that ends before its last token, by its deadline, its client or its router, leaves nothing at the worker."""

from __future__ import annotations

import asyncio
import contextlib
import re
from time import monotonic

import pytest

from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, NumericalError, RequestError, Unavailable
from jdisagg.core.requests import Output
from jdisagg.router.prefixes import BLOCK_TOKENS
from jdisagg.router.recovery import ReplayConfig
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.router.rig import ask, assert_whole, collect, fleet, stop, tokens
from tests.unit.wire.rig import request, run_quiet, until


def test_a_request_that_cannot_begin_leaves_nothing_behind():
    async def body() -> None:
        router = await Router().start()
        with pytest.raises(OverflowError):
            await collect(router, request("r1", prompt=(2**63,) * BLOCK_TOKENS, fork_group="r"))
        assert not (await router.engine.debug_state())["flights"]
        assert not router.engine._placement._homes, "a group of siblings lives"
        await stop(router)

    run_quiet(body())


@pytest.mark.covers("X14")
def test_a_request_ends_at_its_deadline_even_when_the_worker_does_not():
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        worker.engine.frozen = True
        began_s = monotonic()
        (output,) = await collect(router, ask("r1", left_s=0.2))
        assert isinstance(output.error, DeadlineExceeded)
        assert 0.2 <= monotonic() - began_s < 20.0, "not before it"
        await until(lambda: not worker.engine.live)
        await stop(router, worker)

    run_quiet(body())


def test_what_a_worker_fails_a_request_for_is_in_the_log_unless_its_client_alone_can_help_it(caplog):
    async def body() -> None:
        router = await Router().start()
        (worker,) = await fleet(FakeWorker((router.address,)), router=router)
        errors = (
            NumericalError("request r1: step 3 produced no usable logits (NaN)"),
            RequestError("request r2: out of its mind"),
            InvalidRequest("request r3: wrong"),
            DeadlineExceeded("request r4: late"),
        )
        for number, worker.engine.refuse in enumerate(errors, start=1):
            (output,) = await collect(router, ask(f"r{number}"))
            assert (type(output.error), str(output.error)) == (type(worker.engine.refuse), worker.engine.refuse.message)
        where = f"failed; stage before its first token, worker fake @ {worker.address}"
        said = [record.getMessage() for record in caplog.records if record.name == "jdisagg.router.recovery"]
        assert said == [
            f"request r1: {where}: step 3 produced no usable logits (NaN)",
            f"request r2: {where}: out of its mind",
        ]
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
        assert re.fullmatch(r"draining: nothing more is admitted, 1 requests are waited for (30|2\d(\.\d)?) s", line)
        await stop(router, worker)

    with caplog.at_level("INFO"):
        run_quiet(body())


def test_a_bug_of_the_router_is_no_client_that_went_away_and_is_left_to_the_edge_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bug(*_: object) -> None:
        raise OverflowError("our bug")

    async def body() -> None:
        router = await Router().start()
        monkeypatch.setattr(router.engine._placement, "place", bug)
        with pytest.raises(OverflowError):
            await collect(router, ask("r1"))
        ended = [line for line in router.metrics.text().splitlines() if line.startswith("jdisagg_requests_finished_total")]
        assert ended
        assert [line for line in ended if not line.endswith(" 0.0")] == []
        assert "jdisagg_request_seconds_count 1.0" in router.metrics.text()
        await stop(router)

    run_quiet(body())
