"""A body of few bytes that would take long to read is refused before it is read; what was read is not kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import weakref
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from jdisagg.api.http import body, chat, completions, earlier_calls, parameters
from jdisagg.api.http.body import MAX_STRUCTURE, Body, num_structures, wrong_type
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

CHAT = {"messages": [{"role": "user", "content": "the"}]}
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
TEXTS = ["", "a", '[{:"', "\\", '\\"', '"', '\\\\"[', "é[\n", ": \\u005b"]


def test_structure_is_counted_outside_strings_alone() -> None:
    for first in TEXTS:
        for second in TEXTS:
            for third in TEXTS:
                raw = json.dumps({first: [second, third], f"{third}{first}": {second: [[third + second]], "x": ""}}).encode()
                rest = STRING.sub(b"", raw)
                num = rest.count(b"[") + rest.count(b"{") + rest.count(b":")
                assert num_structures(raw) == num, raw
                assert all((num_structures(raw, limit) > limit) == (num > limit) for limit in range(12)), raw


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'{"":1}', b"[" * 190 + b"]" * 190, b'{"[":"\\""}'])
def test_a_body_of_too_many_lists_is_refused_before_it_is_parsed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, unit: bytes
) -> None:
    sent = b'{"prompt": "the", "metadata": [' + b",".join([unit] * (MAX_STRUCTURE // 190 if len(unit) > 190 else 33_000))
    sent += b"," + b",".join([b"[]"] * MAX_STRUCTURE) + b"]}"
    monkeypatch.setattr(body, "is_too_deep", lambda value: pytest.fail("parsed"))

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = await http.post(path, content=sent)
                assert answer.status_code == 413
                said = f"the body has more than {MAX_STRUCTURE} lists, objects and keys; send several requests"
                assert answer.json()["error"]["message"].startswith(said)

    run(check())


def test_bodies_that_are_on_their_way_have_so_much_memory_together(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "ROOM_BYTES", 2**20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 700000\r\n\r\n{"

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            small, large = {"prompt": "the"}, {"prompt": "the", "user": "x" * 500_000}
            assert (await http.post("/v1/completions", json=large)).status_code == 200
            _, slow = await asyncio.open_connection("127.0.0.1", served.port)
            slow.write(head + b" " * 600_000)
            async with asyncio.timeout(30.0):
                while (answer := await http.post("/v1/completions", json=large)).status_code != 429:
                    await asyncio.sleep(0.01)  # the slow one has only begun
            assert "requests of " in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "5"
            assert (await http.post("/v1/completions", json=small)).status_code == 200
            slow.close()
            async with asyncio.timeout(30.0):
                while (await http.post("/v1/completions", json=large)).status_code != 200:
                    await asyncio.sleep(0.01)

    run(check())


def test_code_in_strings_and_the_largest_requests_are_no_such_body(tokenizer: Tokenizer) -> None:
    code = 'def f(x): return {"a": [1], "b\\n": {}}\n'
    message = {"role": "user", "content": [{"type": "text", "text": code}]}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
    for fields in (
        {"prompt": code * 50_000},
        {"prompt": [[5] * 100] * 1024},
        {"messages": [message] * 5000},
        {"messages": [message], "tools": [tool] * 2000},
        {"stop": [code] * 20_000},
    ):
        assert num_structures(json.dumps(fields).encode()) <= MAX_STRUCTURE
    engine = FakeEngine(tokenizer, "fox")

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            asked = {"prompt": "the", "user": code * 50_000}
            assert (await http.post("/v1/completions", json=asked)).status_code == 200

    run(check())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_arguments_of_calls_are_counted_as_a_body_is_before_they_are_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def asked(*arguments: str) -> dict[str, Any]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
        return {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": calls}]}

    half = '{"a": [' + "[], " * (MAX_STRUCTURE // 2 - 4) + "[]]}"
    assert num_structures(half.encode()) == MAX_STRUCTURE // 2

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            assert "at most" not in (await http.post(path, json=asked(half, half))).text
            monkeypatch.setattr(earlier_calls, "_object_of", lambda _: pytest.fail("read"))
            for arguments in ((half, half, "{}"), ("[[" * MAX_STRUCTURE,), (half, "{}", half)):
                answer = await http.post(path, json=asked(*arguments))
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "messages[1].tool_calls")
                said = (
                    f"arguments may have at most {MAX_STRUCTURE} lists, objects and keys, all messages together; shorten them"
                )
                assert error["message"] == f"messages[1].tool_calls: {said}"

    run(check())


PARTS = ["\\ud83d", "\\uDE00", "\\uDBFF", "\\udc00", "\\u00e9", "\\\\", "x", "\\n", "ud83d", "😀"]


def test_a_body_is_written_again_for_half_a_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = list[Any](), json.dumps

    def counted(value: Any, **options: Any) -> str:
        written.append(value)
        return write(value, **options)

    monkeypatch.setattr(json, "dumps", counted)
    for parts in itertools.product(PARTS, repeat=4):
        raw = f'{{"a": "{"".join(parts)}"}}'.encode()
        halves = re.search("[\ud800-\udfff]", json.loads(raw)["a"])
        written.clear()
        with nullcontext() if halves is None else pytest.raises(InvalidRequest, match="half of a pair"):
            body._parse(raw)
        assert bool(written) == (halves is not None), parts


def test_too_many_prompts_and_biases_are_refused_before_they_are_looked_at(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[object] = []
    is_token_list = body._is_token_list

    def counted(value: list[Any]) -> bool:
        looked_at.append(value)
        return is_token_list(value)

    monkeypatch.setattr(body, "_is_token_list", counted)
    monkeypatch.setattr(parameters, "wrong_type", lambda *_: pytest.fail("looked at"))

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            answer = await http.post("/v1/completions", json={"prompt": [[1]] * 1025})
            said = "prompt: may hold at most 1024 prompts; got 1025, send several requests"
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
            assert len(looked_at) == 1
            for path, asked in (("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", CHAT)):
                answer = await http.post(path, json=asked | {"logit_bias": {f"x{number}": 1 for number in range(301)}})
                said = "logit_bias: may hold at most 300 tokens; got 301"
                assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)

    run(check())


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        ([1] * 1_000_000, "[1, 1, 1"),
        ({"a": ["é" * 1000] * 1000}, '{"a": ["éééé'),
        ("é" * 1_000_000, '"ééé'),
    ],
)
def test_a_wrong_value_is_written_no_further_than_it_is_shown(monkeypatch: pytest.MonkeyPatch, got: object, shown: str) -> None:
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("written"))
    error = wrong_type("n", "an integer", got)
    begin, end = "n: must be an integer; got ", "..."
    assert error.message.startswith(begin + shown)
    assert error.message.endswith(end)
    assert len(error.message) == len(begin) + 80 + len(end)
    assert isinstance(error, InvalidRequest)
    assert wrong_type("n", "an integer", {"a": [1]}).message == begin + '{"a": [1]}'


class Watching(FakeEngine):
    """Notes whether the bodies of its requests are still there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, "fox")
        self.bodies: list[weakref.ref[Body]] = []
        self.kept: list[bool] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        """See FakeEngine."""
        self.kept.append(self.bodies[-1]() is not None)
        async for output in super().generate(request):
            yield output


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_gone_before_its_answer_is_waited_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine, read = Watching(tokenizer), body.read_body

    async def watched(request: Any) -> Body:
        read_now = await read(request)
        engine.bodies.append(weakref.ref(read_now))
        return read_now

    monkeypatch.setattr(chat, "read_body", watched)
    monkeypatch.setattr(completions, "read_body", watched)

    async def check() -> None:
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for path, asked in (("/v1/completions", {"prompt": "the"}), ("/v1/chat/completions", CHAT)):
                assert (await http.post(path, json=asked | {"stream": stream})).status_code == 200

    run(check())
    assert engine.kept == [False, False]
