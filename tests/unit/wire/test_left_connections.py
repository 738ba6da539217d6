"""Of channels that were closed nothing connects any more, though nobody searches for garbage: gRPC goes on with one for as long
as a call of it is held, be it by the traceback of an error that somebody keeps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from jdisagg.handoff.messages import Accepted, HandoffId
from tests.unit.ports import kept_port
from tests.unit.router.fakes import FakeWorker
from tests.unit.wire.peers import Decode, Prefill, opening
from tests.unit.wire.rig import identity, run_quiet, until
from tests.unit.wire.router_link import Client

TIMES = 3
BACK_OFF_S = 1.0  # of gRPC, at most


@pytest.fixture(autouse=True)
def _nobody_searches_for_garbage() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with kept_port() as port:
        yield f"127.0.0.1:{port}"


async def callers(address: str) -> int:
    """How many connect there within twice the longest time between two tries."""
    num_callers, end_s = 0, asyncio.get_running_loop().time() + 2 * BACK_OFF_S

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_callers
        num_callers += 1
        writer.close()

    host, _, port = address.rpartition(":")
    async with await asyncio.start_server(count, host, int(port)):
        await asyncio.sleep(end_s - asyncio.get_running_loop().time())
    return num_callers


def test_of_peers_that_were_not_there_nothing_is_left(nobody: str) -> None:
    async def body() -> None:
        d, address = Decode(), nobody
        for serial in range(TIMES):
            handoff = HandoffId("r", serial)
            d.client.open(address, handoff, opening())
            await until(lambda handoff=handoff: d.ends(handoff))
        assert await callers(address) == 0
        await d.client.aclose()

    run_quiet(body(), patient=False)


def test_of_peers_that_died_nothing_is_left(nobody: str) -> None:
    async def body() -> None:
        d, address = Decode(), nobody
        for serial in range(TIMES):
            p, handoff = Prefill(identity(epoch=f"epoch-{serial}")), HandoffId("r", serial)
            await p.start(port=int(address.rpartition(":")[2]))
            d.client.open(address, handoff, opening())
            await until(p.opened)
            p.opened()[0].reply.send(Accepted(cached_tokens=0))
            await until(lambda handoff=handoff: d.messages(handoff))
            await p.server.stop(0)
            await until(lambda handoff=handoff: d.ends(handoff))
            await until(lambda: not d.client._tasks)  # it is asked once whether it lives
        assert await callers(address) == 0
        await d.client.aclose()

    run_quiet(body(), patient=False)


def test_of_workers_that_died_or_were_not_there_nothing_is_left() -> None:
    async def body() -> None:
        worker = await FakeWorker(()).start()
        links = [Client(worker.address) for _ in range(TIMES)]
        await until(lambda: all(link.ups for link in links))
        await worker.die()
        await until(lambda: all(link.downs for link in links))
        late = [Client(worker.address) for _ in range(TIMES)]
        await until(lambda: all(link.downs for link in late))
        assert await callers(worker.address) == 0

    run_quiet(body(), patient=False)
