"""A chat that is rendered beside the event loop waits as long as its client does, and no longer than its deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
import pytest

from jdisagg.api.generation import long_texts
from jdisagg.text.chat import ChatTemplate
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import WAIT_LIMIT_S, FakeEngine, run, serving
from tests.unit.api_edge.test_disconnect import _send
from tests.unit.api_edge.test_long_texts import LONG, beside, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2, "user": "u" * 2**16}
TEXT: dict[str, Any] = {"prompt": "a " * LONG}


@dataclass
class Work:
    """What the threads for long texts have begun with, and may go on with."""

    begun: list[int] = field(default_factory=list)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """In place of long work."""
        self.begun.append(1)
        self.may_go_on.wait(WAIT_LIMIT_S)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """What is read beside the event loop takes until the end of this."""
    work, render, encode = Work(), ChatTemplate.render, Tokenizer.encode

    def slow_render(self: ChatTemplate, *given: Any, **options: Any) -> str:
        work.wait()
        return render(self, *given, **options)

    def slow_encode(self: Tokenizer, *given: Any, **options: Any) -> tuple[int, ...]:
        if threading.current_thread() is not threading.main_thread():
            work.wait()
        return encode(self, *given, **options)

    monkeypatch.setattr(ChatTemplate, "render", slow_render)
    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    try:
        yield work
    finally:
        work.may_go_on.set()


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/tokenize", CHAT), ("/tokenize", TEXT)],
    ids=["chat", "completion", "tokenized chat", "tokenized text"],
)
def test_what_no_client_waits_for_any_more_is_not_begun(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox", max_model_len=100_000)
        with held_up(monkeypatch) as work:
            async with serving(engine, tokenizer) as served:
                clients = [await _send(served, path, asked) for _ in range(6)]
                waiting = served.edge.long_texts
                await until(lambda: waiting._num_requests == 6 and len(work.begun) == long_texts.THREADS)
                for _, writer in clients:
                    writer.close()
                await until(lambda: not waiting._num_requests)
                work.may_go_on.set()
                await beside(waiting, lambda: None)  # behind those that were begun
                assert len(work.begun) == long_texts.THREADS
                assert not engine.requests

    run(check())


@pytest.mark.parametrize("num_before", [0, long_texts.THREADS], ids=["begun", "waiting"])
def test_the_deadline_of_a_chat_runs_from_its_arrival(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        with held_up(monkeypatch) as work:
            async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
                clients = [await _send(served, "/tokenize", CHAT) for _ in range(num_before)]
                await until(lambda: len(work.begun) == num_before)
                answer = await http.post("/v1/chat/completions", json=CHAT | {"timeout_s": 0.2})
                assert answer.status_code == 504
                assert "its deadline passed before its prompt and its grammar were read" in answer.text
                assert served.ends() == {"deadline": 1.0}
                assert not engine.requests
                refused = await http.post("/v1/chat/completions", json=CHAT | {"timeout_s": 0})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout_s")
                for _, writer in clients:
                    writer.close()

    run(check())


def test_the_engine_gets_what_the_rendering_left_of_the_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        with held_up(monkeypatch) as work:
            async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
                began_s = monotonic()
                asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"timeout_s": 8.0}))
                await until(lambda: work.begun)
                rendering_s = monotonic()
                await asyncio.sleep(0.2)
                work.may_go_on.set()
                assert (await asking).status_code == 200
                assert began_s + 8.0 <= engine.requests[0].deadline_s <= rendering_s + 8.0

    run(check())
