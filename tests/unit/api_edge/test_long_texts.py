"""Long texts have two threads of their own, and a bounded queue before them; short ones do not notice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import pytest

from jdisagg.api.generation import long_texts
from jdisagg.api.generation.long_texts import INLINE_CHARACTERS, MAX_WAITING_CHARACTERS, LongTexts
from jdisagg.api.http import tokens
from jdisagg.api.turns import Turns
from jdisagg.core.errors import Overloaded, Unavailable
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import WAIT_LIMIT_S, FakeEngine, Served, run, serving

T = TypeVar("T")
LONG = INLINE_CHARACTERS + 1


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def beside(texts: LongTexts, function: Callable[[], T]) -> T:
    async with texts.place(LONG) as run_:
        return await run_(function)


def test_two_run_at_a_time_and_a_cancelled_one_leaves_no_third() -> None:
    async def check() -> None:
        texts, free, begun = LongTexts(), threading.Event(), list[int]()

        def work(number: int) -> int:
            begun.append(number)
            free.wait(WAIT_LIMIT_S)
            return number

        tasks = [asyncio.create_task(beside(texts, lambda number=number: work(number))) for number in range(6)]
        await until(lambda: len(begun) == 2)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0.05)
        assert sorted(begun) == [0, 1]  # two threads, and either may be the first to say so
        free.set()
        assert [await tasks[number] for number in (1, 2, 4, 5)] == [1, 2, 4, 5]
        assert sorted(begun) == [0, 1, 2, 4, 5]

    run(check())


def test_where_no_thread_is_left_a_long_text_waits_for_none_and_those_that_are_there_do_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def check() -> None:
        texts, done = LongTexts(), list[int]()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Unavailable, match="no thread is left to read a long text: can't start new thread"):
                await beside(texts, lambda: done.append(-1))
        await beside(texts, lambda: done.append(0))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            await asyncio.gather(*(beside(texts, lambda number=number: done.append(number)) for number in range(1, 6)))
        assert sorted(done) == [*range(6)]

    run(check())


def test_beyond_so_many_characters_that_wait_a_request_is_told_when_to_come_again() -> None:
    async def check() -> None:
        texts = LongTexts()
        async with texts.place(MAX_WAITING_CHARACTERS - 1), texts.place(3 * MAX_WAITING_CHARACTERS):
            with pytest.raises(Overloaded, match=f"2 requests of {4 * MAX_WAITING_CHARACTERS - 1} characters") as caught:
                await beside(texts, lambda: 1)
            assert caught.value.retry_after_s == 5.0
            async with texts.place(INLINE_CHARACTERS) as at_once:
                assert await at_once(threading.current_thread) is threading.main_thread()
        assert await beside(texts, lambda: 3) == 3

    run(check())


@asynccontextmanager
async def crowded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """A long text has its place; no more may wait."""
    monkeypatch.setattr(long_texts, "MAX_WAITING_CHARACTERS", LONG)
    engine = FakeEngine(tokenizer, "fox", max_model_len=100_000)
    async with (
        serving(engine, tokenizer) as served,
        httpx.AsyncClient(base_url=served.http) as http,
        served.edge.long_texts.place(LONG),
    ):
        yield served, http


def test_every_way_to_the_tokenizer_has_that_bound_for_long_texts_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with crowded(tokenizer, monkeypatch) as (served, http):
            for num, status in ((10, 200), (2 * LONG, 429)):
                text = "a " * num
                for path, fields in (
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/completions", {"prompt": [[5] * 100] * (1 + num // 100), "echo": True}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * (1 + num // 4000)}]}),
                    ("/tokenize", {"prompt": text}),
                    ("/tokenize", {"prompt": text[: len(text) // 6], "return_token_strs": True}),
                    ("/tokenize", {"messages": [{"role": "user", "content": text * (1 + num // 4000)}]}),
                    ("/detokenize", {"tokens": [5] * num}),
                ):
                    answer = await http.post(path, json=fields | {"max_tokens": 2})
                    assert answer.status_code == status, (path, num, answer.text)
                    assert answer.headers.get("retry-after") == ("5" if status == 429 else None)
            ids = {"prompt": [5] * 2 * LONG, "max_tokens": 2}
            assert (await http.post("/v1/completions", json=ids)).status_code == 200, "nothing to tokenize"
        del served

    run(check())


@pytest.mark.parametrize(
    ("prompts", "said", "num_encoded"),
    [
        (["a"] * 400 + ["b" * 100_000], "maximum context length", 0),
        (["a b c d e f g " * 10] + ["a"] * 400 + [[5] * 201], "maximum context length", 0),
        (["a"] * 5 + ["a" * 200] + ["a"] * 400, "maximum context length", 6),
    ],
)
def test_no_prompt_is_tokenized_behind_one_that_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, prompts: list[object], said: str, num_encoded: int
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> tuple[int, ...]:
        encoded.append(text)
        return encode(self, text, **options)

    engine = FakeEngine(tokenizer, "fox")

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            monkeypatch.setattr(Tokenizer, "encode", counted)
            answer = await http.post("/v1/completions", json={"prompt": prompts})
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]

    run(check())
    assert len(encoded) == num_encoded


def test_what_tokenize_answers_is_bounded_and_written_beside_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[threading.Thread] = set()
    write = tokens.long_json

    def noted(answer: dict[str, Any]) -> bytes:
        writers.add(threading.current_thread())
        return write(answer)

    monkeypatch.setattr(tokens, "long_json", noted)
    engine = FakeEngine(tokenizer, "fox", max_model_len=2000)

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked = {"prompt": "the é " * 700, "return_token_strs": True}
            answer = await http.post("/tokenize", json=asked)
            assert answer.text == json.dumps(answer.json(), ensure_ascii=False, separators=(",", ":"))
            assert threading.main_thread() not in writers
            back = await http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
            assert back.json()["prompt"].endswith("the é " * 700)
            assert back.headers["content-type"] == "application/json"
            beyond = "a " * 2000 * tokenizer.max_token_characters
            writers.clear()
            counted = (await http.post("/tokenize", json={"prompt": beyond})).json()
            assert writers
            assert threading.main_thread() not in writers
            assert counted["count"] == len(tokenizer.encode(beyond)) > counted["max_model_len"], "who is to cut it has to count"
            refused = await http.post("/tokenize", json={"prompt": "a" * (tokens.MAX_CHARACTERS + 1)})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            assert "at most 1048576 characters" in refused.json()["error"]["message"]

    run(check())


def test_short_texts_take_the_tokenizer_by_turns_and_no_thread_that_others_need(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns, wait = [0], Turns.wait

    async def noted(self: Turns) -> None:
        num_turns[0] += 1
        await wait(self)

    monkeypatch.setattr(Turns, "wait", noted)

    async def check() -> None:
        engine, taken, free = FakeEngine(tokenizer, "fox"), ThreadPoolExecutor(1), threading.Event()
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asyncio.get_running_loop().set_default_executor(taken)
            waits = asyncio.create_task(asyncio.to_thread(free.wait, WAIT_LIMIT_S))
            try:
                for path, asked, turns in (
                    ("/tokenize", {"prompt": "the " * 1000, "return_token_strs": True}, 1),
                    ("/tokenize", {"messages": [{"role": "user", "content": "fox"}]}, 2),
                    ("/detokenize", {"tokens": [5] * INLINE_CHARACTERS}, 1),
                ):
                    num_turns[0] = 0
                    answers = await asyncio.gather(*(http.post(path, json=asked) for _ in range(20)))
                    assert {answer.status_code for answer in answers} == {200}
                    assert num_turns[0] == 20 * turns
                assert not waits.done()
            finally:
                free.set()
                await waits

    run(check())
