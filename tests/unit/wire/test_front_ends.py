"""Two front-ends of one worker: real engine thread, real Run streams; only the device is arithmetic."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import FinishReason
from tests.unit.sched.engine_fake import expected, request
from tests.unit.wire.rig import until
from tests.unit.wire.unified_worker import FrontEnd, checked, everything, working


@pytest.mark.covers("V36")
def test_each_front_end_gets_the_outputs_of_its_own_requests_and_no_others() -> None:
    async def body() -> None:
        async with working() as worker:
            one, other = FrontEnd(worker.address), FrontEnd(worker.address)
            asked: dict[str, tuple[FrontEnd, tuple[int, ...], int]] = {}
            for number in range(12):  # interleaved, more than there are slots
                front = (one, other)[number % 2]
                prompt, count = tuple(range(1 + number, 4 + 2 * number)), 1 + number
                asked[f"r{number}"] = (front, prompt, count)
                front.link.submit(request(f"r{number}", prompt, count))
                await asyncio.sleep(0.003 * (number % 3))
            await until(lambda: len(one.ends()) == len(other.ends()) == 6)
            for name, (front, prompt, count) in asked.items():
                stranger = other if front is one else one
                assert front.tokens(name) == expected(prompt, count)
                assert stranger.of(name) == []
            await one.link.close()
            await other.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_an_id_that_two_front_ends_use_stays_with_the_first_whatever_the_second_does() -> None:
    async def body() -> None:
        async with working() as worker:
            first = FrontEnd(worker.address)
            await until(lambda: first.link.answered)
            await worker.freeze()  # all that follows is there before the engine looks
            first.link.submit(request("same", (1, 2, 3), 20))
            await until(lambda: worker.num_posted == 1)
            second = FrontEnd(worker.address)
            second.link.submit(request("same", (4, 5), 9))
            await until(lambda: worker.num_posted == 2)
            second.link.cancel("same", 0)
            await until(lambda: worker.num_posted == 3)
            third = FrontEnd(worker.address)
            third.link.submit(request("same", (6,), 9))
            await until(lambda: worker.num_posted == 4)
            await third.link.close()
            await until(lambda: worker.num_posted == 5)  # the end of its stream cancels what came on it
            worker.thread.is_frozen = False
            await until(lambda: first.ends() and second.ends())
            assert first.tokens("same") == expected((1, 2, 3), 20)
            assert first.ends() == [FinishReason.LENGTH]
            (refused,) = second.outputs
            assert isinstance(refused.error, Unavailable), "its router may try another worker, or wait for the end"
            assert "use a new id" in refused.error.message
            await first.link.close()
            await second.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_a_replay_of_one_router_never_ends_another_routers_request_of_that_id() -> None:
    """Refused once, the second router asks again: that is an attempt like that of a router which replays."""

    async def body() -> None:
        async with working() as worker:
            first, second = FrontEnd(worker.address, "one"), FrontEnd(worker.address, "other")
            await until(lambda: first.link.answered and second.link.answered)
            await worker.freeze()
            first.link.submit(request("same", (1, 2, 3), 20))
            await until(lambda: worker.num_posted == 1)
            second.link.submit(replace(request("same", (4, 5), 9), attempt=1))
            await until(lambda: worker.num_posted == 2)
            worker.thread.is_frozen = False
            await until(lambda: first.ends() and second.ends())
            assert first.tokens("same") == expected((1, 2, 3), 20)
            (refused,) = second.outputs
            assert isinstance(refused.error, Unavailable)
            await first.link.close()
            await second.link.close()

    checked(body)


@pytest.mark.covers("V36")
def test_a_replay_on_a_new_stream_of_the_same_router_takes_the_place_of_the_older_attempt() -> None:
    async def body() -> None:
        async with working() as worker:
            broken = FrontEnd(worker.address, "one")
            await until(lambda: broken.link.answered)
            await worker.freeze()
            broken.link.submit(request("same", (1, 2, 3), 20))
            broken.link.submit(request("other", (1, 2), 20))
            await until(lambda: worker.num_posted == 2)
            again = FrontEnd(worker.address, "one")
            again.link.submit(replace(request("same", (1, 2, 3), 20), attempt=1))
            await until(lambda: worker.num_posted == 5)  # both are cancelled, one comes
            await until(lambda: broken.downs, what=lambda: "who opens another stream has given up the first")
            worker.thread.is_frozen = False
            await until(again.ends)
            assert again.tokens("same") == expected((1, 2, 3), 20)
            assert broken.ends() == []
            await broken.link.close()
            await again.link.close()
            await until(lambda: worker.service.num_streams == 0)
            assert worker.service._runs == {}

    checked(body)


@pytest.mark.covers("V36")
def test_a_front_end_that_goes_takes_its_own_requests_with_it() -> None:
    async def body() -> None:
        async with working() as worker:
            stays, goes = FrontEnd(worker.address), FrontEnd(worker.address)
            await until(lambda: stays.link.answered and goes.link.answered)
            await worker.freeze()
            stays.link.submit(request("stays", (1, 2), 30))
            goes.link.submit(request("goes", (3, 4), 30))
            await until(lambda: worker.num_posted == 2)
            await goes.link.close()
            await until(lambda: worker.num_posted == 3)
            worker.thread.is_frozen = False
            await until(stays.ends)
            assert stays.tokens("stays") == expected((1, 2), 30)
            assert goes.outputs == []
            assert await worker.streams() == []
            await stays.link.close()

    checked(body)


def test_a_replay_of_a_router_without_a_name_ends_no_request_of_the_workers_own_clients() -> None:
    async def body() -> None:
        async with working() as worker:
            router = FrontEnd(worker.address)
            await until(lambda: router.link.answered)
            await worker.freeze()
            own = asyncio.create_task(everything(worker, "same"))
            await until(lambda: worker.num_posted == 1)
            router.link.submit(replace(request("same", (4, 5), 9), attempt=1))
            await until(lambda: worker.num_posted == 2)
            worker.thread.is_frozen = False
            assert (await own)[-1].finish is FinishReason.LENGTH
            await until(router.ends)
            assert isinstance(router.outputs[0].error, Unavailable)
            await router.link.close()

    checked(body)
