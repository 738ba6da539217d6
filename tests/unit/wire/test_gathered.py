"""A worker's own engine and requests whose tokens nobody reads before their end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.api.generation import local_engine
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.gathered import MOST_GATHERED
from jdisagg.api.generation.intake import TextRequest
from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.core.errors import DeadlineExceeded, Unavailable
from jdisagg.core.requests import EngineRequest, FinishReason, Output, SamplingParams
from jdisagg.roles.inbox import Cancel
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.sched.engine_fake import request
from tests.unit.wire.rig import WAIT_LIMIT_S, until
from tests.unit.wire.unified_worker import CARD, checked, everything, working

NUM_TOKENS = 2 * MOST_GATHERED + 5
GATHERED = replace(request("own", (1, 2), NUM_TOKENS), gathered=True)


class _Told:
    """A LocalEngine whose engine thread says what the test says."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        thread: Any = SimpleNamespace(loop=SimpleNamespace(inbox=SimpleNamespace(post=self.posted.append)))
        self.local = LocalEngine(thread, CARD, not_ready_reason=lambda: "")
        self.read: list[Output] = []

    async def reading(self, asked: EngineRequest = GATHERED) -> asyncio.Task[None]:
        """Begin to read its answer."""

        async def read() -> None:
            async for output in self.local.generate(asked):
                self.read.append(output)

        task = asyncio.create_task(asyncio.wait_for(read(), WAIT_LIMIT_S))
        await until(lambda: self.posted)
        return task

    async def tells(self, *, first: int, end: int, finish: FinishReason | None = None, request_id: str = "own") -> None:
        """Tokens [first, end), a tick each; `finish` with the last one."""
        for token in range(first, end):
            last = finish if token == end - 1 else None
            self.posted[0].sink([Output(request_id=request_id, token_ids=(token,), finish=last)])
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.read for token in output.token_ids]


def test_its_reader_is_woken_a_few_times_and_at_once_when_it_ends() -> None:
    async def body() -> None:
        engine = _Told()
        task = await engine.reading()
        await engine.tells(first=0, end=MOST_GATHERED - 1)
        assert not engine.read
        await engine.tells(first=MOST_GATHERED - 1, end=NUM_TOKENS - 1)
        assert len(engine.read) in (1, 2)
        await engine.tells(first=NUM_TOKENS - 1, end=NUM_TOKENS, finish=FinishReason.LENGTH)
        await task
        assert engine.tokens == [*range(NUM_TOKENS)]
        assert len(engine.read) <= 3
        assert engine.read[-1].finish is FinishReason.LENGTH
        assert len(engine.posted) == 1, "nothing was cancelled"

    checked(body)


def test_requests_that_began_together_are_not_all_read_in_the_same_tick() -> None:
    async def body() -> None:
        engine, num_requests = _Told(), 48
        ids = [f"own-{index}" for index in range(num_requests)]
        tasks = [await engine.reading(replace(GATHERED, request_id=request_id)) for request_id in ids]
        await until(lambda: len(engine.posted) == num_requests)
        most = 0
        for token in range(MOST_GATHERED):
            before = len(engine.read)
            engine.posted[0].sink([Output(request_id=request_id, token_ids=(token,)) for request_id in ids])
            for _ in range(3):
                await asyncio.sleep(0)
            most = max(most, len(engine.read) - before)
        assert len(engine.read) == num_requests, "each was read once"
        assert most <= num_requests // 10
        engine.posted[0].sink([Output(request_id=request_id, finish=FinishReason.LENGTH) for request_id in ids])
        await asyncio.gather(*tasks)
        assert sorted(engine.tokens) == sorted([*range(MOST_GATHERED)] * num_requests)

    checked(body)


def test_one_that_is_read_as_it_comes_is_not_kept_waiting() -> None:
    async def body() -> None:
        engine = _Told()
        task = await engine.reading(replace(GATHERED, gathered=False))
        for token in range(3):
            await engine.tells(first=token, end=token + 1)
            assert engine.tokens == [*range(token + 1)]
        await engine.tells(first=3, end=4, finish=FinishReason.STOP)
        await task

    checked(body)


def test_an_engine_that_says_no_more_does_not_keep_its_reader_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "DEADLINE_GRACE_S", 0.1)

    async def body() -> None:
        engine = _Told()
        task = await engine.reading(replace(GATHERED, deadline_s=monotonic() + 0.1))
        await engine.tells(first=0, end=2)
        with pytest.raises(DeadlineExceeded, match="no answer from the engine"):
            async with asyncio.timeout(WAIT_LIMIT_S):
                await task
        assert engine.posted[1:] == [Cancel("own", 0, engine.local._sink)]

    checked(body)


def test_a_worker_that_shuts_down_and_a_client_that_leaves_end_it_with_tokens_unread() -> None:
    async def body() -> None:
        for closes in (True, False):
            engine = _Told()
            task = await engine.reading()
            await engine.tells(first=0, end=2)
            engine.local.close() if closes else task.cancel()
            with pytest.raises(Unavailable if closes else asyncio.CancelledError):
                async with asyncio.timeout(WAIT_LIMIT_S):
                    await task
            assert engine.posted[1:] == [Cancel("own", 0, engine.local._sink)]

    checked(body)


def test_an_aborted_answer_has_what_was_generated_before_the_abort(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        engine = _Told()
        edge = Edge(engine.local, tokenizer)
        asked = TextRequest(request_id="own", prompts=((1, 2),), sampling=SamplingParams(), max_tokens=40, n=3)
        answering = asyncio.create_task(edge.complete(await edge.admit(asked)))
        await until(lambda: len(engine.posted) == 3)
        await engine.tells(first=2, end=9, request_id="own/0")
        await engine.tells(first=3, end=6, request_id="own/1")
        engine.posted[0].sink([Output(request_id="own/1", token_ids=(6,), finish=FinishReason.LENGTH)])
        assert edge.abort("own")  # in the moment in which one of them ends by itself
        async with asyncio.timeout(WAIT_LIMIT_S):
            transcript = await answering
        assert [choice.token_ids.tolist() for choice in transcript.choices] == [[*range(2, 9)], [*range(3, 7)], []]
        ends = [choice.finish for choice in transcript.choices]
        assert ends == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]
        assert transcript.choices[0].text == tokenizer.decode(range(2, 9))
        assert transcript.usage.completion_tokens == 11
        cancels = [posted for posted in engine.posted if isinstance(posted, Cancel)]
        assert {cancel.request_id for cancel in cancels} >= {"own/0", "own/2"}

    checked(body)


def test_a_gathered_answer_has_the_tokens_of_one_that_is_read_as_it_comes() -> None:
    async def body() -> None:
        async with working() as worker:
            asked = replace(request("gathered", (1, 2, 3), 8), gathered=True)
            many, [one] = await everything(worker, "r"), [output async for output in worker.local.generate(asked)]
            assert len(many) == 8
            assert one.token_ids == tuple(token for output in many for token in output.token_ids)
            last = many[-1]
            assert (one.finish, one.cached_tokens, one.stop_token_id) == (last.finish, last.cached_tokens, last.stop_token_id)
            assert one.provenance is not None

    checked(body)
