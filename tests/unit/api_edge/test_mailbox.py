"""A queue of which everything that is there is taken at once."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.api.mailbox import Mailbox
from tests.unit.api_edge.fakes import run


def test_a_reader_is_woken_once_for_everything_that_came_and_gets_it_in_order() -> None:
    async def check() -> None:
        mailbox = Mailbox[int]()
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        for item in range(3):
            mailbox.put(item)
        assert await taking == [0, 1, 2]
        mailbox.put(3)
        mailbox.put(4)
        assert await mailbox.get() == 3
        assert await mailbox.take() == [4]
        assert mailbox.taken() == []

    run(check())


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_reader_that_is_cancelled_has_taken_nothing(takes_all: bool) -> None:
    """Also when what it waited for comes in the same moment."""

    async def check() -> None:
        mailbox = Mailbox[int]()
        reading = asyncio.ensure_future(mailbox.take() if takes_all else mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        mailbox.put(2)
        assert await mailbox.take() == [1, 2]

    run(check())


def test_what_is_cleared_does_not_come_and_who_waits_gets_what_comes_after() -> None:
    async def check() -> None:
        mailbox = Mailbox[int]()
        reading = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(1)
        mailbox.clear()
        await asyncio.sleep(0)
        mailbox.put(2)
        assert await reading == 2

    run(check())


@pytest.mark.parametrize("in_a_hurry", [True, False])
def test_what_may_wait_wakes_nobody_until_enough_or_something_urgent_came(in_a_hurry: bool) -> None:
    async def check() -> None:
        mailbox = Mailbox[int](wake_at=3)
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        for item in range(2):
            mailbox.put(item, at_once=False)
            await asyncio.sleep(0)
            assert not taking.done()
        mailbox.put(2, at_once=in_a_hurry)
        assert await taking == [0, 1, 2]
        mailbox.put(3, at_once=False)
        assert await mailbox.take() == [3], "what is there is waited for by nobody"

    run(check())


def test_something_urgent_comes_with_all_that_waited() -> None:
    async def check() -> None:
        mailbox = Mailbox[int](wake_at=3)
        taking = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(0, at_once=False)
        mailbox.put(1)
        assert await taking == [0, 1]

    run(check())
