"""The fault harness hears how a stream over HTTP ends."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chaos_kit.catalogue import Entry
from chaos_kit.client import TRANSPORT, Clients
from chaos_kit.outcome import Fate, Outcome, Visit

ENTRY = Entry(prompt=(1,), sampling={"max_tokens": 1})
ANSWER = {"choices": [{"index": 0, "token_ids": [5], "text": "a", "finish_reason": "length"}], "usage": None}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def asked(status: int, content: str) -> Outcome:
    visit = Visit(number=0, entry=0, fate=Fate.STAYS, after_s=0, over_http=True, stream=True, priority=0, cache_salt="")
    outcome = Outcome(visit=visit)
    router: Any = SimpleNamespace(name="R", http="r", incarnation=1, up=True)

    async def body() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, text=content))
        async with httpx.AsyncClient(transport=transport) as http:
            await Clients(lambda number: router, http).run(outcome, ENTRY, 5.0)

    asyncio.run(body())
    return outcome


def events(*messages: dict[str, Any], end: str) -> str:
    return "".join(f"data: {json.dumps(message)}\n\n" for message in messages) + end


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (200, events(ANSWER, USAGE, end="data: [DONE]\n\n"), None),
        (200, events(ANSWER, USAGE, end=""), TRANSPORT),  # in good order, and yet not whole
        (200, events(ANSWER, end='data: {"choices": [{\n\n'), TRANSPORT),
        (500, "Internal Server Error", TRANSPORT),  # as of a server below ours
    ],
)
def test_a_stream_is_well_when_it_said_that_it_is_done(status: int, content: str, error: str | None) -> None:
    outcome = asked(status, content)
    assert outcome.error == error, outcome.detail
    assert outcome.well is (error is None)
