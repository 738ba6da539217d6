"""A worker that drains is one line in the log of its router, which says, too, when nobody is left to do its work."""

from __future__ import annotations

from time import monotonic

import pytest

from jdisagg.core.requests import Role
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.router.rig import stop
from tests.unit.wire.rig import run_quiet, until


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "jdisagg.router.worker_news" and " drains" in record.getMessage()
    ]


async def there(router: Router, *workers: FakeWorker) -> None:
    for worker in workers:
        await worker.start()
    await until(lambda: len(router.engine.workers.members()) == len(workers))
    await until(lambda: router.linked() == sum(worker._role is not Role.PREFILL for worker in workers))


async def drain(worker: FakeWorker) -> None:
    worker.draining = True
    for _ in range(3):
        await worker.announce()


def test_the_last_decode_worker_that_drains_is_a_warning_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        d1, d2, p = (FakeWorker((router.address,), role) for role in (Role.DECODE, Role.UNIFIED, Role.PREFILL))
        await there(router, d1, d2, p)
        await drain(d1)
        assert lines(caplog) == [("INFO", f"decode worker fake @ {d1.address} drains: it gets no new requests")]
        caplog.clear()
        await drain(d2)
        ((level, said),) = lines(caplog)
        why = "every decode or unified worker is draining"
        assert level == "WARNING"
        assert said.startswith(
            f"unified worker fake @ {d2.address} drains, and nobody is left for new requests: {why} (fake @ "
        )
        assert d1.address in said
        await stop(router, d1, d2, p)

    run_quiet(body())


@pytest.mark.parametrize("needs_prefill", [False, True])
def test_so_is_the_last_prefill_worker_of_its_weights(needs_prefill: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        d = FakeWorker((router.address,), needs_prefill=needs_prefill)
        p1, p2 = (FakeWorker((router.address,), Role.PREFILL) for _ in range(2))
        other = FakeWorker((router.address,), Role.PREFILL, fingerprint="weights-2")
        await there(router, d, p1, p2, other)
        await drain(p1)
        assert [level for level, _ in lines(caplog)] == ["INFO"]
        caplog.clear()
        await drain(p2)
        ((level, said),) = lines(caplog)
        assert level == "WARNING"
        assert said.startswith(f"prefill worker fake @ {p2.address} drains, and ")
        assert ("nobody is left for new requests: no prefill worker that pairs" in said) is needs_prefill
        assert ("no other of its weights computes prompts: decode workers do it themselves" in said) is not needs_prefill
        await stop(router, d, p1, p2, other)

    run_quiet(body())


@pytest.mark.parametrize(("of_decode", "level"), [("weights-2", "INFO"), (None, "WARNING")])
def test_nothing_is_missing_where_no_decode_worker_of_its_weights_is_left(
    of_decode: str | None, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        d = FakeWorker((router.address,), **({} if of_decode is None else {"fingerprint": of_decode}))
        p = FakeWorker((router.address,), Role.PREFILL)
        await there(router, d, p)
        await drain(p)
        assert [level for level, _ in lines(caplog)] == [level]
        await stop(router, d, p)

    run_quiet(body())


def test_one_that_drains_when_it_registers_or_with_its_router_may_be_the_last_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def body() -> None:
        router = await Router().start()
        d1, d2 = FakeWorker((router.address,)), FakeWorker((router.address,))
        d1.draining = True
        await there(router, d1, d2)
        await router.engine.drain(monotonic())
        await drain(d2)
        assert [level for level, _ in lines(caplog)] == ["INFO", "INFO"]
        await stop(router, d1, d2)

    run_quiet(body())
