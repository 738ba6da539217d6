"""Answers with many scores are written one after the other, for those alone who still want theirs."""

from __future__ import annotations

import asyncio
import json
import threading
from types import ModuleType
from typing import Any, get_args

import httpx
import pytest
from starlette.responses import JSONResponse

from jdisagg.api.generation.choice import LONG_POSITIONS, Delta, Kept, Transcript
from jdisagg.api.http import answer_json, chat, completions
from jdisagg.core.requests import TokenLogprob
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.wire.rig import until

SCORED = {"prompt": [3 + number % 40 for number in range(LONG_POSITIONS + 2)], "max_tokens": 1, "prompt_logprobs": 1}


def test_an_answer_whose_client_has_hung_up_is_not_written(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    go, written, write = threading.Event(), list[Any](), answer_json.long_json

    def slowly(answer: dict[str, Any]) -> bytes:
        written.append(answer["choices"])
        assert go.wait(60.0)
        return write(answer)

    monkeypatch.setattr(answer_json, "long_json", slowly)

    async def asked() -> None:
        engine = FakeEngine(tokenizer, "fox", max_model_len=1000)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http, timeout=60.0) as http:
            first = asyncio.create_task(http.post("/v1/completions", json=SCORED))
            await until(lambda: written)
            waiters = served.edge._one_thread
            gone, stays = (asyncio.create_task(http.post("/v1/completions", json=SCORED)) for _ in range(2))
            await until(lambda: waiters._waiters and len(waiters._waiters) == 2)
            gone.cancel()
            await until(lambda: waiters._waiters and len(waiters._waiters) == 1)
            go.set()
            assert [(await one).status_code for one in (first, stays)] == [200, 200]
        assert len(written) == 2

    run(asked())


IDS = [3 + number % 40 for number in range(3000)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_with_many_token_ids_is_written_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    writers, write = list[str](), answer_json.long_json

    def noted(answer: dict[str, Any]) -> bytes:
        writers.append(threading.current_thread().name)
        content = write(answer)
        assert content == JSONResponse(answer).body
        return content

    monkeypatch.setattr(answer_json, "long_json", noted)
    monkeypatch.setattr(answer_json, "_SLICE", 999)

    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox", max_model_len=10_000)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked: dict[str, Any] = {"max_tokens": 2, "n": 6, "return_token_ids": True}
            if is_chat := "chat" in path:
                asked |= {"messages": [{"role": "user", "content": "\u00e9" * 1500}]}
            else:
                asked |= {"prompt": IDS}
            for fields, is_long in (({}, True), ({"return_token_ids": False}, False), ({"n": 2}, False)):
                writers.clear()
                answer = (await http.post(path, json=asked | fields)).json()
                assert bool(writers) is is_long
                assert threading.current_thread().name not in writers
                prompts = [request.prompt_token_ids for request in engine.requests[-len(answer["choices"]) :]]
                shown = [answer] if is_chat else answer["choices"]
                if "return_token_ids" not in fields:
                    assert [tuple(one["prompt_token_ids"]) for one in shown] == prompts[: len(shown)]
                    assert all(len(choice["token_ids"]) == 2 for choice in answer["choices"])

    run(check())


@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_with_much_text_is_written_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, is_long: bool
) -> None:
    writers, write = list[str](), answer_json.long_json
    monkeypatch.setattr(answer_json, "LONG_TEXT", 59 if is_long else 60)
    monkeypatch.setattr(
        answer_json, "long_json", lambda answer: writers.append(threading.current_thread().name) or write(answer)
    )

    async def check() -> None:
        engine = FakeEngine(tokenizer, "foxfoxfoxfoxfox")
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
            choices = (await http.post(path, json=asked | {"max_tokens": 100, "n": 4})).json()["choices"]
            texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in choices]
            assert texts == ["foxfoxfoxfoxfox"] * 4
            assert bool(writers) is is_long
            assert threading.current_thread().name not in writers

    run(check())


@pytest.mark.parametrize("module", [completions, chat])
def test_a_chunk_with_a_long_prompt_s_token_ids_is_written_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    writers = list[str]()

    def noted(event: dict[str, Any]) -> bytes:
        writers.append(threading.current_thread().name)
        content = answer_json.long_event(event)
        assert content == answer_json.encode_event(event)
        return content

    monkeypatch.setattr(module, "long_event", noted)

    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox", max_model_len=100_000)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for length, num_long in ((answer_json.LONG_IDS + 1, 2 if module is completions else 1), (100, 0)):
                writers.clear()
                asked: dict[str, Any] = {"max_tokens": 3, "n": 2, "stream": True, "return_token_ids": True}
                if module is chat:
                    path, asked["messages"] = "/v1/chat/completions", [{"role": "user", "content": length * "\u00e9"}]
                else:
                    path, asked["prompt"] = "/v1/completions", length * [3]
                lines = (await http.post(path, json=asked)).text.split("\n\n")
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
                shown = [part for chunk in chunks for part in (chunk, *chunk["choices"]) if part.get("prompt_token_ids")]
                prompt = list(engine.requests[-1].prompt_token_ids)
                assert [part["prompt_token_ids"] for part in shown] == (1 if module is chat else 2) * [prompt]
                assert len(writers) == num_long
                assert threading.current_thread().name not in writers

    run(check())


def test_who_waits_no_longer_does_not_let_the_next_one_begin_beside_its_thread(tokenizer: Tokenizer) -> None:
    go, begun = threading.Event(), list[str]()

    def work(name: str) -> str:
        begun.append(name)
        assert name != "first" or go.wait(60.0)
        return name

    async def body() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            first, second = (
                asyncio.create_task(served.edge.beside(lambda name=name: work(name))) for name in ("first", "second")
            )
            await until(lambda: begun)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert first.cancelled(), "at once"
            await asyncio.sleep(0.1)
            assert begun == ["first"]
            go.set()
            assert await second == "second"

    run(body())


def test_an_event_of_many_scores_is_one_line_for_whoever_ends_lines_as_python_does(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox", max_model_len=1000)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            prompt = "\x85\u2028\u2029" * 50
            asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "stream": True}
            answer = await http.post("/v1/completions", json=asked)
            assert len(prompt.encode()) > LONG_POSITIONS, "a token each"
            *lines, done = filter(None, answer.text.splitlines())
            assert done == "data: [DONE]"
            texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
            assert "".join(texts).startswith(prompt)

    run(check())


def test_scores_that_their_reader_has_already_are_not_kept() -> None:
    score = TokenLogprob(7, -0.5, ())
    delta = Delta(index=0, text="a", token_ids=(7,), logprobs=(score,), prompt_logprobs=(None, score))
    kept = []
    for keep in get_args(Kept):
        transcript = Transcript(1, n=1, num_prompt_tokens=2, keep=keep)
        transcript.add(delta)
        (one,) = transcript.choices
        kept.append(("".join(one.texts), len(one.token_ids), len(one.logprobs), len(one.prompt_logprobs)))
        assert transcript.usage.completion_tokens == 1
    assert kept == [("a", 1, 1, 2), ("a", 1, 0, 0), ("", 0, 0, 0)]
