"""A client that leaves in the very moment in which a token arrives is gone all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jdisagg.api.local_engine import LocalEngine
from jdisagg.api.token_engine import ModelCard
from jdisagg.core.requests import Output
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
        await asyncio.wait({client}, timeout=5)
        assert client.done(), f"it goes on as if nothing had happened, after {received}"
        assert client.cancelled()
        assert isinstance(posted[-1], Cancel), "the engine is not told"

    run_quiet(body())
