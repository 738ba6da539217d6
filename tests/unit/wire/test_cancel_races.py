"""A client that leaves in the very moment in which a token arrives is gone all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.api.generation.local_engine import LocalEngine
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import FinishReason, Output
from jdisagg.roles.inbox import Cancel, Submit
from tests.unit.sched.engine_fake import request
from tests.unit.wire.rig import run_quiet

CARD = ModelCard(name="m", max_model_len=48, vocab_size=31, eos_token_ids=(0,), fingerprint="f")


@pytest.mark.covers("H10")
def test_a_cancellation_that_comes_together_with_an_output_is_not_lost() -> None:
    async def body() -> None:
        posted: list[Any] = []
        thread = SimpleNamespace(loop=SimpleNamespace(inbox=SimpleNamespace(post=posted.append)))
        local = LocalEngine(thread, CARD, not_ready_reason=lambda: "")  # type: ignore[arg-type]
        asked, received = request("r", [1, 2, 3]), list[Output]()

        async def consume() -> None:
            async for output in local.generate(asked):
                received.append(output)

        client = asyncio.create_task(consume())
        for _ in range(5):
            await asyncio.sleep(0)
        (submitted,) = posted
        assert isinstance(submitted, Submit)
        submitted.sink([Output(request_id="r", token_ids=(1,))])  # crosses to the loop, and right behind it ..
        asyncio.get_running_loop().call_soon(client.cancel)
        await asyncio.wait({client}, timeout=30)
        assert client.done(), f"it goes on as if nothing had happened, after {received}"
        assert client.cancelled()
        assert isinstance(posted[-1], Cancel), "the engine is not told"

    run_quiet(body())


def test_what_an_engine_still_says_of_a_cancelled_request_is_not_for_the_next_one_of_its_id() -> None:
    async def body() -> None:
        posted: list[Any] = []
        thread = SimpleNamespace(loop=SimpleNamespace(inbox=SimpleNamespace(post=posted.append)))
        local = LocalEngine(thread, CARD, not_ready_reason=lambda: "")  # type: ignore[arg-type]

        async def consume(received: list[Output]) -> None:
            async for output in local.generate(request("r", [1, 2, 3])):
                received.append(output)

        first, received = asyncio.create_task(consume([])), list[Output]()
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(consume(received))
        await asyncio.sleep(0.01)
        old, _, new = posted
        old.sink([Output(request_id="r", attempt=old.request.attempt, token_ids=(77,))])  # of a tick that was under way
        last = Output(request_id="r", attempt=new.request.attempt, token_ids=(5,), finish=FinishReason.LENGTH)
        new.sink([last])
        await asyncio.wait({second}, timeout=30)
        assert received == [last]

    run_quiet(body())
