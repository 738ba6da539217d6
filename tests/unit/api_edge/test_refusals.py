"""A call that is refused before an engine has it counts once, as `invalid`; what an engine ended, the engine counts."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import httpx
import openai
import pytest

from jdisagg.core.errors import InvalidRequest, Overloaded, RequestError
from jdisagg.core.fleet import ModelCard
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import FakeEngine, run, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BAD = [  # path, body, headers
    ("/v1/completions", b"{", {}),
    ("/v1/completions", b'{"prompt": 5}', {}),
    ("/v1/completions", b'{"prompt": "the", "temperature": -1}', {}),
    ("/v1/completions", b'{"prompt": "the", "model": "other"}', {}),
    ("/v1/completions", b'{"prompt": "the", "n": 3, "stream": true, "max_tokens": 999}', {}),
    ("/v1/completions", b'{"prompt": "the"}', {"x-request-id": "two words"}),
    ("/v1/chat/completions", b'{"messages": []}', {}),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "model": "other"}', {}),
]
NO_REQUESTS = [("/v1/nothing", b"{}"), ("/tokenize", b"{}"), ("/detokenize", b'{"tokens": [-1]}')]


def test_a_bad_call_over_http_counts_once(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for number, (path, body, headers) in enumerate(BAD, start=1):
                answer = await http.post(path, content=body, headers=headers)
                assert answer.status_code in (400, 404), answer.text
                assert served.ends() == {"invalid": number}, (path, body)
            for path, body in NO_REQUESTS:
                assert (await http.post(path, content=body)).is_client_error
            assert (await http.get("/v1/completions")).status_code == 405
            assert (await http.post("/v1/completions", json={"prompt": "the", "n": 2})).is_success
            assert (await http.post("/v1/chat/completions", json=CHAT)).is_success
            assert served.ends() == {"invalid": len(BAD)}

    run(check())


def test_a_bad_call_over_grpc_counts_once(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            hot = common_pb2.SamplingParams(temperature=-1)
            for number, (asked, code) in enumerate(
                [
                    (generation_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
                    (generation_pb2.GenerateRequest(text="the", sampling=hot), grpc.StatusCode.INVALID_ARGUMENT),
                    (generation_pb2.GenerateRequest(text="the", model="other"), grpc.StatusCode.NOT_FOUND),
                ],
                start=1,
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await served.stub.Generate(asked).read()
                assert caught.value.code() is code
                assert served.ends() == {"invalid": number}

    run(check())


@pytest.mark.parametrize("error", [InvalidRequest("the pool is too small for it"), Overloaded("full")])
@pytest.mark.parametrize("at_admission", [True, False])
def test_what_an_engine_ends_is_left_to_the_engine_to_count(
    error: RequestError, at_admission: bool, tokenizer: Tokenizer
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        if at_admission:
            engine.refusal = error
        else:
            engine.failure = (0, error)
        async with serving(engine, tokenizer) as served:
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError):
                    await served.client.completions.create(model="tiny", prompt="the", stream=stream)
                with pytest.raises(openai.APIStatusError):
                    await served.client.chat.completions.create(model="tiny", stream=stream, **CHAT)  # type: ignore[call-overload]
            with pytest.raises(grpc.aio.AioRpcError):
                await served.stub.Generate(generation_pb2.GenerateRequest(text="the")).read()
            assert served.ends() == {}

    run(check())


def test_a_client_that_leaves_is_no_refusal(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox" * 20)
        engine.delay_s = 0.05
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "the", "max_tokens": 50}))
            while not engine.live:
                await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await served.wait_idle()
            assert served.ends() == {}

    run(check())


def test_a_bug_ends_a_grpc_call_with_internal_and_the_log_alone_knows_more(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(FakeEngine):
        async def first_card(self, deadline_s: float) -> ModelCard:
            raise OverflowError("secret path /models/m")

    async def check() -> None:
        async with serving(Buggy(tokenizer, "fox"), tokenizer) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.Generate(generation_pb2.GenerateRequest(request_id="mine", text="the")).read()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details() == "internal error; the server's log has the details"
            assert "secret path" in caplog.text
            assert "request mine: a call of Generate failed" in caplog.text

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_ends_a_call_over_http_and_the_log_has_its_id(
    stream: bool, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox" * 20)
        engine.failure = (2 if stream else 0, OverflowError("secret path /models/m"))  # type: ignore[assignment]
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked = {"prompt": "the", "stream": stream}
            answer = await http.post("/v1/completions", json=asked, headers={"x-request-id": "mine"})
            assert answer.status_code == (200 if stream else 500)
            assert "internal error; the server's log has the details" in answer.text
            assert "secret" not in answer.text
        (said,) = [message for message in caplog.messages if "cmpl-mine-" in message]
        assert said.startswith("request cmpl-mine-")
        assert "failed" in said
        assert "secret path" in caplog.text

    run(check())
