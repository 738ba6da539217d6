"""One timer for all messages of a call: it ends a write that waits too long, and nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import grpc.aio
import pytest

from jdisagg.api import unread
from jdisagg.api.unread import Reader
from jdisagg.v1 import generation_pb2
from tests.unit.api_edge.fakes import run
from tests.unit.wire.rig import until

MESSAGE = generation_pb2.GenerateResponse(request_id="r")


class Context:
    """A call whose client takes messages while it may."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.num_written = 0

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        await self.takes.wait()
        self.num_written += 1

    def reader(self) -> Reader:
        return Reader(cast(grpc.aio.ServicerContext, SimpleNamespace(write=self.write)))


def num_timers() -> int:
    scheduled = asyncio.get_running_loop()._scheduled  # pyright: ignore[reportAttributeAccessIssue]
    return sum(not timer.cancelled() for timer in scheduled)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 0.2)


def test_a_message_that_waits_too_long_is_not_taken_and_its_task_goes_on() -> None:
    async def check() -> None:
        context = Context()
        with context.reader() as reader:
            context.takes.set()
            for _ in range(3):
                assert await reader.takes(MESSAGE)
            await asyncio.sleep(0.3)  # the model thinks: nothing waits, however often the timer is due
            assert await reader.takes(MESSAGE)
            context.takes.clear()
            assert not await reader.takes(MESSAGE)
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
        assert context.num_written == 4

    run(check())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_that_is_cancelled_while_it_writes_is_cancelled(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the moment in which its client is too late."""

    monkeypatch.setattr(unread, "UNREAD_TIMEOUT_S", 60.0)  # it is late when the test says so

    async def check() -> None:
        context = Context()
        reader = context.reader()

        async def write() -> bool:
            with reader:
                return await reader.takes(MESSAGE)

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.05)
        if is_late:
            reader._until_s = 0.0
            reader._look()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    run(check())


def test_a_later_message_may_wait_as_long_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looks, look = [100.0], list[float](), Reader._look
    monkeypatch.setattr(unread, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(Reader, "_look", lambda reader: (looks.append(now_s[0]), look(reader))[1])

    async def check() -> None:
        context = Context()
        context.takes.set()
        with context.reader() as reader:
            assert await reader.takes(MESSAGE)
            now_s[0] += 0.15
            context.takes.clear()
            writing = asyncio.create_task(reader.takes(MESSAGE))
            await asyncio.sleep(0)
            now_s[0] += 0.1
            await until(lambda: looks)  # the timer that was set for the first
            context.takes.set()
            assert await writing
            assert num_timers() == 2
        assert num_timers() == 1, "that of the test"

    run(check())
