"""A burst of work leaves the event loop its turns: `jdisagg.api.turns`, and the edge and router that use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise

import pytest

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import TextRequest
from jdisagg.api.http.app import make_app
from jdisagg.api.turns import PER_TURN, Turns
from jdisagg.core.requests import EngineRequest, Output, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine

NUM = 10 * PER_TURN + 1


async def most_in_a_turn(count: Callable[[], int], until: Callable[[], bool]) -> int:
    """The most by which `count` grows between two turns of the loop in which somebody else comes to run."""
    most, seen = 0, count()
    while not until():
        await asyncio.sleep(0)
        most, seen = max(most, count() - seen), count()
    return most


async def go_on(turns: Turns, number: int, gone_on: list[int]) -> None:
    """Wait for a turn and say so."""
    await turns.wait()
    gone_on.append(number)


def test_what_comes_at_once_goes_on_a_few_at_a_time_in_its_order() -> None:
    async def run() -> None:
        turns, gone_on = Turns(), list[int]()

        tasks = [asyncio.create_task(go_on(turns, number, gone_on)) for number in range(NUM)]
        rounds = list[int]()

        def all_on() -> bool:
            rounds.append(len(gone_on))
            return len(gone_on) == NUM

        assert await most_in_a_turn(lambda: len(gone_on), all_on) == PER_TURN
        assert gone_on == list(range(NUM))
        idle = sum(earlier == later for earlier, later in pairwise(rounds))
        assert idle >= 8 * (NUM // PER_TURN - 1), "rounds in which gRPC takes in its events"
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_alone_waits_for_nobody() -> None:
    turns = Turns()

    async def run() -> None:
        for _ in range(3):
            with pytest.raises(StopIteration):
                turns.wait().send(None)  # it ran to its end without giving the loop a turn
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_who_gave_up_waiting_takes_nobodys_turn() -> None:
    async def run() -> None:
        turns, gone_on = Turns(), list[int]()

        tasks = [asyncio.create_task(go_on(turns, number, gone_on)) for number in range(4 * PER_TURN)]
        await asyncio.sleep(0)  # all have asked
        for task in tasks[PER_TURN : 3 * PER_TURN]:
            task.cancel()
        await tasks[-1]
        assert gone_on == [*range(PER_TURN), *range(3 * PER_TURN, 4 * PER_TURN)]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))


class CountingEngine(FakeEngine):
    """Counts requests that reached it."""

    num_begun = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        self.num_begun += 1
        async for output in super().generate(request):
            yield output


def test_a_burst_is_tokenized_a_few_prompts_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        edge, read = Edge(FakeEngine(tokenizer, "fox"), tokenizer), list[str]()
        encode = Tokenizer.encode
        monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **more: [read.append(text), encode(self, text, **more)][1])
        jobs = [
            asyncio.create_task(edge.admit(TextRequest(request_id=str(number), prompts=("the",), sampling=SamplingParams())))
            for number in range(NUM)
        ]
        assert await most_in_a_turn(lambda: len(read), lambda: len(read) == NUM) == PER_TURN
        await asyncio.gather(*jobs)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_choices_of_a_request_begin_a_few_at_a_time(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = CountingEngine(tokenizer, "fox")
        edge = Edge(engine, tokenizer)
        request = TextRequest(request_id="r", prompts=("the",), sampling=SamplingParams(max_tokens=4), n=NUM)
        whole = asyncio.create_task(edge.complete(await edge.admit(request)))
        assert await most_in_a_turn(lambda: engine.num_begun, lambda: engine.num_begun == NUM) == PER_TURN
        await whole

    asyncio.run(asyncio.wait_for(run(), 60))


def test_http_calls_are_read_a_few_at_a_time(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = FakeEngine(tokenizer, "fox")
        app, read = make_app(Edge(engine, tokenizer), engine, lambda: ""), list[int]()
        body = b'{"model": "no such", "prompt": "the"}'

        async def call(number: int) -> None:
            async def receive() -> dict[str, object]:
                if number in read:
                    await asyncio.Event().wait()  # until the call ends
                read.append(number)
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(_: object) -> None:
                """Nobody looks at the answer."""

            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
            await app(scope, receive, send)

        calls = [asyncio.create_task(call(number)) for number in range(NUM)]
        assert await most_in_a_turn(lambda: len(read), lambda: all(each.done() for each in calls)) == PER_TURN
        await asyncio.gather(*calls)
        assert len(read) == NUM

    asyncio.run(asyncio.wait_for(run(), 60))
