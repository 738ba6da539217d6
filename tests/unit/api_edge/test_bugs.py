"""A call that a bug of ours ends counts once, as `error`, wherever the bug is; and of many bugs the log has the first few."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from jdisagg.api.generation.choice import ChoiceText
from jdisagg.api.generation.ends import Ends
from jdisagg.api.http import completions
from jdisagg.api.http.answer_json import encode_event
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import RequestError
from jdisagg.core.logs import BUG_FIRST
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.router.fleet_engine import FleetEngine
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import generation_pb2
from tests.unit.api_edge.fakes import FakeEngine, Served, run, serving


def bug(*_args: object, **_fields: object) -> None:
    raise OverflowError("our bug")


async def call(served: Served, *, stream: bool = False, path: str = "/v1/completions") -> httpx.Response:
    prompt = {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=served.http) as http:
        return await http.post(path, json={"stream": stream, "n": 2, "logprobs": 1 if "prompt" in prompt else None} | prompt)


async def generate(served: Served) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.stub.Generate(generation_pb2.GenerateRequest(text="the", n=2)):
            pass
    return caught.value.code()


def test_a_bug_before_the_engine_counts_once_for_each_call(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            monkeypatch.setattr("jdisagg.api.generation.edge.admit", bug)
            for number, path in enumerate(("/v1/completions", "/v1/chat/completions"), start=1):
                assert (await call(served, path=path)).status_code == 500
                assert served.ends() == {"error": number}
            assert (await call(served, stream=True)).status_code == 500
            assert served.ends() == {"error": 3}
            assert await generate(served) is grpc.StatusCode.INTERNAL
            assert served.ends() == {"error": 4}

    run(check())


def test_a_bug_behind_the_engine_counts_once_for_each_call(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            monkeypatch.setattr(ChoiceText, "absorb", bug)
            assert (await call(served)).status_code == 500
            assert (await call(served, stream=True)).status_code == 500
            assert await generate(served) is grpc.StatusCode.INTERNAL
            assert served.ends() == {"error": 3}

    run(check())


def test_a_bug_in_an_answer_that_is_whole_counts_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            monkeypatch.setattr(completions._Answer, "whole", bug)
            assert (await call(served)).status_code == 500
            assert served.ends() == {"error": 1}

    run(check())


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_stream_that_a_bug_cuts_counts_once_and_its_client_is_told(
    num_good: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_written = 0

    def breaking(event: dict[str, Any]) -> bytes:
        nonlocal num_written
        num_written += 1
        if num_written == num_good + 1:
            raise OverflowError("our bug")
        return encode_event(event)

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox" * 5), tokenizer) as served:
            monkeypatch.setattr("jdisagg.api.http.connection.encode_event", breaking)
            answer = await call(served, stream=True)
            assert answer.status_code == 200
            assert answer.text.count("data: ") == num_good + 1
            assert "internal error; the server's log has the details" in answer.text
            assert "[DONE]" not in answer.text
            assert served.ends() == {"error": 1}

    run(check())


def test_a_bug_of_the_fleet_counts_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fleet(FakeEngine):
        """Its own card, and a fleet's generate."""

        fleet: FleetEngine

        def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
            return self.fleet.generate(request)

    async def check() -> None:
        engine = Fleet(tokenizer, "fox")
        async with serving(engine, tokenizer) as served:
            engine.fleet = FleetEngine(config=TransferConfig(), metrics=served.metrics)
            monkeypatch.setattr(engine.fleet._placement, "place", bug)
            try:
                for number in (1, 2):
                    async with httpx.AsyncClient(base_url=served.http) as http:
                        answer = await http.post("/v1/completions", json={"prompt": "the", "stream": number == 2})
                    assert answer.status_code == 500
                    assert served.ends() == {"error": number}
            finally:
                await engine.fleet.close()

    run(check())


def test_a_body_that_is_not_read_is_no_request(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
            assert answer.status_code == 415
            assert served.ends() == {}

    run(check())


def test_of_many_bugs_the_log_has_the_first_few(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            monkeypatch.setattr("jdisagg.api.generation.edge.admit", bug)
            for _ in range(BUG_FIRST + 3):
                assert (await call(served)).status_code == 500
                assert await generate(served) is grpc.StatusCode.INTERNAL
            assert served.ends() == {"error": 2 * (BUG_FIRST + 3)}
        assert sum("the stack is logged, too" in message for message in caplog.messages) == BUG_FIRST
        assert sum("a call of Generate failed" in message for message in caplog.messages) == BUG_FIRST

    run(check())


def test_an_edge_without_metrics_counts_nothing() -> None:
    ends = Ends(None)
    ends.aborted(2)
    ends.failed(RequestError("one"))
    ends.failed(OverflowError("one"))
    ends.answered_tools("called")


def test_an_error_that_the_engine_counts_is_not_counted_again() -> None:
    metrics = Metrics()
    ends, known, other = Ends(metrics), RequestError("known"), RequestError("other")
    ends.has_counted(known)
    ends.failed(known)
    ends.failed(other)
    assert metrics.requests.finished.labels(reason="error")._value.get() == 1
