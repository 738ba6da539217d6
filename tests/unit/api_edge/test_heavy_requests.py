"""One client's heavy request holds up nobody else: what takes long is bounded, or runs beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from difflib import get_close_matches
from typing import Any

import grpc.aio
import httpx
import pytest

from jdisagg.api.generation import choice
from jdisagg.api.generation import service as generation
from jdisagg.api.http import body, chat, completions, protocol, tokens
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import FakeEngine, run, serving

GOOD = {"model": "tiny", "prompt": "the", "max_tokens": 2}


def post(tokenizer: Tokenizer, path: str, fields: dict[str, Any]) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            return await http.post(path, json=fields)

    return run(asked())


def test_of_many_unknown_fields_a_few_are_compared(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counted(name: str, *rest: Any, **options: Any) -> list[str]:
        compared.append(name)
        return get_close_matches(name, *rest, **options)

    monkeypatch.setattr(body, "get_close_matches", counted)
    unknown = {f"key_{number:020}": 1 for number in range(10_000)}
    assert post(tokenizer, "/v1/completions", GOOD | {"x" * 100_000: 1} | unknown).status_code == 200
    assert len(compared) <= 32
    assert max(map(len, compared)) <= 40


def test_token_ids_beyond_the_models_context_are_refused_before_they_are_looked_at(tokenizer: Tokenizer) -> None:
    answer = post(tokenizer, "/v1/completions", GOOD | {"prompt": [10_000_000] * 201})
    assert answer.status_code == 400
    assert "maximum context length is 200 tokens, but 201 in the prompt" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("num_ids", "max_tokens", "advice"), [(200, 0, "prompt"), (198, 5, "prompt or lower max_tokens")])
def test_what_is_too_long_is_told_what_would_help(tokenizer: Tokenizer, num_ids: int, max_tokens: int, advice: str) -> None:
    """A prompt to be scored asks for no tokens, of which fewer could be asked for."""
    answer = post(tokenizer, "/v1/completions", GOOD | {"prompt": [5] * num_ids, "max_tokens": max_tokens, "echo": True})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.endswith(f"; shorten the {advice}")
    asked = f"{max_tokens} for the answer were requested" if max_tokens else "one more to score it are needed"
    assert f"{num_ids} in the prompt and {asked}" in said


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Those in which a tokenizer encoded or decoded."""
    seen: set[threading.Thread] = set()
    for name in ("encode", "decode"):

        def noted(self: Tokenizer, *rest: Any, original: Any = getattr(Tokenizer, name), **options: Any) -> Any:
            seen.add(threading.current_thread())
            return original(self, *rest, **options)

        monkeypatch.setattr(Tokenizer, name, noted)
    return seen


@pytest.mark.parametrize(("num_prompts", "inline"), [(2, True), (200, False)])
def test_many_short_prompts_are_tokenized_beside_the_loop_as_one_long_one_is(
    tokenizer: Tokenizer, threads: set[threading.Thread], num_prompts: int, inline: bool
) -> None:
    engine = FakeEngine(tokenizer, "fox")

    async def asked() -> int:
        threads.clear()
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            return (await http.post("/v1/completions", json=GOOD | {"prompt": ["a " * 50] * num_prompts})).status_code

    assert run(asked()) == 200
    assert (threads == {threading.main_thread()}) == inline
    assert (threading.main_thread() in threads) == inline


@pytest.mark.parametrize(("num_prompts", "inline"), [(2, True), (200, False)])
def test_many_prompts_are_echoed_as_text_beside_the_loop(
    tokenizer: Tokenizer, threads: set[threading.Thread], num_prompts: int, inline: bool
) -> None:
    engine = FakeEngine(tokenizer, "fox")
    fields = GOOD | {"prompt": [[3, 4] * 45] * num_prompts, "echo": True}

    async def asked() -> int:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            threads.clear()
            return (await http.post("/v1/completions", json=fields)).status_code

    assert run(asked()) == 200
    assert (threading.main_thread() in threads) == inline


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"prompt": "a " * 50, "return_token_strs": True}), ("/detokenize", {"tokens": [3] * 50})],
)
def test_tokenizing_has_a_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    assert post(tokenizer, path, fields).status_code == 200
    monkeypatch.setattr(tokens, "MAX_CHARACTERS", 99)
    monkeypatch.setattr(tokens, "MAX_TOKENS", 49)
    answer = post(tokenizer, path, fields)
    assert answer.status_code == 400
    assert "at most" in answer.json()["error"]["message"]


def test_long_texts_are_not_tokenized_on_the_loop(tokenizer: Tokenizer, threads: set[threading.Thread]) -> None:
    async def asked() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            threads.clear()
            assert (await http.post("/tokenize", json={"prompt": "the fox " * 2500})).status_code == 200
            assert (await http.post("/detokenize", json={"tokens": [3, 4] * 10_000})).status_code == 200

    run(asked())
    assert threads
    assert threading.main_thread() not in threads


def test_an_answer_is_not_cut_because_the_request_after_the_next_one_came_in_part(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.2)
    engine = FakeEngine(tokenizer, "the fox the fox the fox")
    engine.delay_s = 0.2
    sent = b'{"prompt": "the"}'
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\n\r\n" + sent

    async def check() -> None:
        async with serving(engine, tokenizer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for part in (whole, whole + whole[:10], whole[10:]):
                writer.write(part)
                await asyncio.sleep(0.05)
            got = b""
            async with asyncio.timeout(60.0):
                while got.count(b'"object":"text_completion"') < 3:
                    part = await reader.read(65536)
                    assert part, f"cut after {got!r}"
                    got += part
            writer.close()

    run(check())


LONG_PROMPT = [3 + number % 40 for number in range(choice.LONG_POSITIONS + 2)]
WRITERS = ((completions, "prompt_logprobs"), (chat, "chat_logprobs"), (generation, "encode_delta"), (choice, "_score"))


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Threads in which scored tokens were written."""
    seen: set[threading.Thread] = set()
    for module, name in WRITERS:

        def noted(*rest: Any, original: Any = getattr(module, name), **options: Any) -> Any:
            seen.add(threading.current_thread())
            return original(*rest, **options)

        monkeypatch.setattr(module, name, noted)
    return seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [choice.LONG_POSITIONS - 2, choice.LONG_POSITIONS + 2])
def test_many_scored_tokens_are_written_beside_the_loop_and_read_the_same(
    tokenizer: Tokenizer, writers: set[threading.Thread], num_tokens: int, stream: bool
) -> None:
    fields = {"prompt": LONG_PROMPT[:num_tokens], "max_tokens": 1, "stream": stream, "prompt_logprobs": 1, "logprobs": 1}
    engine = FakeEngine(tokenizer, "fox", max_model_len=1000)

    async def asked() -> httpx.Response:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            return await http.post("/v1/completions", json=fields)

    answer = run(asked())
    first = answer.text.partition("\n")[0].removeprefix("data: ")
    (shown,) = json.loads(first)["choices"]
    assert first == json.dumps(json.loads(first), ensure_ascii=False, separators=(",", ":"))
    assert [None if entry is None else next(iter(entry)) for entry in shown["prompt_logprobs"]] == [
        None,
        *map(str, LONG_PROMPT[1:num_tokens]),
    ]
    assert (writers - {threading.main_thread()} != set()) == (num_tokens > choice.LONG_POSITIONS)


def test_many_scored_tokens_go_into_a_grpc_message_beside_the_loop(
    tokenizer: Tokenizer, writers: set[threading.Thread]
) -> None:
    engine = FakeEngine(tokenizer, "", max_model_len=1000)
    asked = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=LONG_PROMPT),
        sampling=common_pb2.SamplingParams(prompt_logprobs=1, max_tokens=1),
    )

    async def ask() -> list[generation_pb2.GenerateResponse]:
        async with serving(engine, tokenizer) as served:
            return [response async for response in served.stub.Generate(asked)]

    responses = run(ask())
    assert [entry.token_id for entry in responses[0].delta.prompt_logprobs][1:] == LONG_PROMPT[1:]
    assert threading.main_thread() not in writers


def test_many_scored_tokens_of_a_chat_are_written_beside_the_loop(tokenizer: Tokenizer, writers: set[threading.Thread]) -> None:
    engine = FakeEngine(tokenizer, "fox " * choice.LONG_POSITIONS, max_model_len=2000)
    engine.tokens_per_output = 50
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000, "logprobs": True, "top_logprobs": 2}

    async def ask() -> httpx.Response:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            return await http.post("/v1/chat/completions", json=asked)

    answer = run(ask())
    assert len(answer.json()["choices"][0]["logprobs"]["content"]) > choice.LONG_POSITIONS
    assert answer.text == json.dumps(answer.json(), ensure_ascii=False, separators=(",", ":"))
    assert len(writers) == 2


@pytest.mark.parametrize(
    ("fields", "limit", "told"),
    [
        ({"token_ids": generation_pb2.TokenIds(ids=[3] * 200)}, 199, "the request has"),
        ({"text": "a " * 150}, 199, "the request has"),
        ({"text": "the", "request_id": "r" * 257}, 300, "request_id: may have at most 256 characters; got 257"),
    ],
)
def test_what_is_too_long_in_a_grpc_request_is_refused_before_it_is_looked_at(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: int, told: str
) -> None:
    monkeypatch.setattr(generation, "MAX_REQUEST_BYTES", limit)
    engine = FakeEngine(tokenizer, "fox", max_model_len=1000)

    async def ask() -> grpc.aio.AioRpcError:
        async with serving(engine, tokenizer) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in served.stub.Generate(generation_pb2.GenerateRequest(**fields)):
                    pass
            return caught.value

    error = run(ask())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert told in (error.details() or "")
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(("num_more", "inline"), [(0, True), (2**16, False)])
def test_a_long_chat_is_rendered_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, num_more: int, inline: bool
) -> None:
    seen: set[threading.Thread] = set()
    render = ChatTemplate.render

    def noted(self: ChatTemplate, *rest: Any, **options: Any) -> str:
        seen.add(threading.current_thread())
        return render(self, *rest, **options)

    monkeypatch.setattr(ChatTemplate, "render", noted)
    messages = [{"role": "user", "content": "the fox"}] * 5
    answer = post(tokenizer, path, {"messages": messages, "max_tokens": 2, "user": "u" * num_more})
    assert answer.status_code == 200
    assert (seen == {threading.main_thread()}) == inline
