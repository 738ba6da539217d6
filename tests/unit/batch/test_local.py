"""The application that answers a batch in its own process: what a server would answer, where it has a bug, too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from jdisagg.api.generation.token_engine import Health
from jdisagg.api.http.app import make_app
from jdisagg.batch import local
from jdisagg.batch.local import client_of, open_local
from jdisagg.batch.sender import Sender
from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError, NumericalError
from jdisagg.core.requests import EngineRequest, FinishReason, Output
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


class NaNEngine:
    """Its thread and its loop: its checkpoint holds NaN."""

    def __init__(self) -> None:
        self.loop = self
        self.ticks = 0

    def call(self, function: Callable[[], object]) -> None:
        function()

    def step_running_s(self, now_s: float) -> float:
        del now_s
        return 0.0

    def self_test(self, request: EngineRequest, sink: Callable[[list[Output]], None], now_s: float) -> None:
        assert request.deadline_s > now_s
        sink([Output(request_id=request.request_id, finish=FinishReason.ERROR, error=NumericalError("NaN in layer 3"))])


def test_a_checkpoint_with_a_nan_ends_a_batch_as_what_the_next_start_would_find_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def aclose() -> None:
        ended.append("aclose")

    deployment = SimpleNamespace(engines=[NaNEngine()], aclose=aclose, stop=lambda: ended.append("stop"))
    monkeypatch.setattr(local, "build_deployment", lambda *_, **__: deployment)

    async def check() -> None:
        with pytest.raises(ConfigError, match="the self-test failed: NaN in layer 3") as refused:
            async with open_local(Config(role="unified"), httpx.Timeout(5)):
                pass
        assert refused.value.exit_status == 2

    asyncio.run(check())
    assert ended == ["aclose", "stop"]
