"""The application that answers a batch in its own process: what a server would answer, where it has a bug, too."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from jdisagg.api.generation.token_engine import Health
from jdisagg.api.http.app import make_app
from jdisagg.batch.local import client_of
from jdisagg.batch.sender import Sender
from tests.unit.api_edge.fakes import FakeEngine


class Buggy(FakeEngine):
    """Does not know how it is."""

    def __init__(self) -> None:
        pass

    def health(self) -> Health:
        """Raises ValueError."""
        raise ValueError("a bug")


def test_a_bug_fails_its_line_as_behind_a_server_and_the_log_has_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with client_of(make_app(None, Buggy(), lambda: ""), httpx.Timeout(5)) as client:
            sender = Sender(client, patience_s=1)
            for _ in range(3):
                status, body = await sender.get("/ready")
                assert (status, body["error"]["type"]) == (500, "server_error")

    asyncio.run(check())
    (told,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert told.exc_info is not None
    assert isinstance(told.exc_info[1], ValueError)
