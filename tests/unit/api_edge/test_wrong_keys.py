"""Whoever sends a wrong API key is in the log, and floods none."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Scope

from jdisagg.api.http import app as http_app
from jdisagg.api.http.app import REFUSED_EVERY_S, _ApiKeyGuard  # pyright: ignore[reportPrivateUsage]

KEY = "Bearer good"


async def answer(request: Request) -> Response:
    return PlainTextResponse("here")


def ask(app: _ApiKeyGuard, key: str) -> int:
    """The status of a call with that key."""
    headers = [(b"authorization", key.encode())]
    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers, "query_string": b""}
    answers: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        answers.append(message)

    asyncio.run(app(scope | {"client": ("203.0.113.7", 4711)}, receive, send))
    return answers[0]["status"]


@pytest.mark.usefixtures("own_log")
def test_a_wrong_key_is_one_line_a_minute_with_the_number_of_the_others_and_without_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(http_app, "monotonic", lambda: now_s[0])
    app = _ApiKeyGuard(Starlette(routes=[Route("/v1/models", answer)]), ["good"])
    assert ask(app, KEY) == 200
    assert caplog.messages == []
    assert [ask(app, "Bearer goood") for _ in range(20)] == [401] * 20
    told = "a call of /v1/models from 203.0.113.7 was refused (401): missing or wrong API key"
    assert caplog.messages == [told]
    now_s[0] += REFUSED_EVERY_S
    ask(app, "Bearer goood")
    assert caplog.messages[1:] == [f"{told}; 19 more since it was last said"]
    assert not re.search("goo+d", caplog.text)
