"""A fleet of fake workers at one router: asked, read to the end, compared, and stopped with nothing left."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.fleet import Member
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role, SamplingParams
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.watch import FleetWatch
from tests.unit.router.fakes import FakeWorker, Router, expected
from tests.unit.wire.rig import request, until


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


def entry_at(fleet: Fleet, address: str) -> Entry:
    """Of the worker there."""
    (entry,) = (entry for entry in fleet.entries() if entry.member.address == address)
    return entry


def look(watch: FleetWatch, members: Sequence[Member], now_s: float) -> str | None:
    """What an operator is told, where that is one thing at most."""
    said = watch.look(members, now_s)
    assert len(said) <= 1, said
    return said[0] if said else None


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
