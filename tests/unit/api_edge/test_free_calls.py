"""Calls that a model writes of its own accord: what of them reaches clients, at once and in a stream."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest
import tokenizers

from jdisagg.text.calls.format import ModelFormat
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.text.tiny_tokenizer import train_byte_level

ARGUMENTS = '{"city": "K}\\"{"}'
NAMES = ("weather", "odd name!")  # a name that could not be forced
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in NAMES],
    "model": "tiny",
}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "odd name!", "arguments": {}}\n</tool_call>'
WEATHER, ODD = ("weather", ARGUMENTS), ("odd name!", "{}")
Shown = tuple[str | None, list[tuple[str, str]], str]  # content, calls, finish_reason
CASES: list[tuple[str, dict[str, Any], Shown]] = [
    (CALL, {}, (None, [WEATHER], "tool_calls")),
    (CALL, {"tool_choice": "auto", "n": 2}, (None, [WEATHER], "tool_calls")),
    (f"fox.\n{CALL}\n{OTHER}", {"logprobs": True}, ("fox.", [WEATHER, ODD], "tool_calls")),
    (f"{OTHER}\n{CALL}", {"parallel_tool_calls": False}, (None, [ODD], "tool_calls")),
    (f"{OTHER}\n{CALL}", {"parallel_tool_calls": False, "stop": "city"}, (None, [ODD], "tool_calls")),
    (f"{CALL} the dog", {"return_token_ids": True}, (" the dog", [WEATHER], "tool_calls")),
    (CALL, {"tool_choice": "none"}, (CALL, [], "stop")),
    (CALL, {"tools": []}, (CALL, [], "stop")),
    (CALL, {"tools": [{"type": "function", "function": {"name": "now"}}]}, (CALL, [], "stop")),
    (CALL, {"stop": "city"}, (None, [("weather", '{"')], "stop")),
    (CALL, {"stop": "</tool"}, (None, [WEATHER], "tool_calls")),
    (CALL, {"stop": "weather"}, ('<tool_call>\n{"name": "', [], "stop")),
    ("fox  \n", {}, ("fox  \n", [], "stop")),
    ("fox <tool_call> jumps", {"stop": "jumps"}, ("fox <tool_call> ", [], "stop")),
    ("", {}, ("", [], "stop")),
    (CALL, {"structured_outputs": {"regex": "x"}}, (None, [WEATHER], "tool_calls")),
]


def parsed(message: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    calls = [one["function"] for one in message.get("tool_calls", ())]
    return message["content"], [(one["name"], one["arguments"]) for one in calls]


@pytest.mark.parametrize(("text", "asked", "wanted"), CASES)
def test_an_answer_and_its_stream_have_the_calls_and_the_text_around_them(
    tokenizer: Tokenizer, text: str, asked: dict[str, Any], wanted: Shown
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, text, max_model_len=4096)
        async with (
            serving(engine, tokenizer, call_format=FORMATS["hermes"]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            whole = await http.post("/v1/chat/completions", json=CHAT | asked)
            assert whole.status_code == 200, whole.text
            ids = set[str]()
            for choice in whole.json()["choices"]:
                message = choice["message"]
                assert (*parsed(message), choice["finish_reason"]) == wanted
                assert ("tool_calls" in message) == bool(wanted[1])
                ids |= {call["id"] for call in message.get("tool_calls", ())}
                assert all(call["type"] == "function" for call in message.get("tool_calls", ()))
            assert len(ids) == len(wanted[1]) * asked.get("n", 1)
            for tokens_per_output in (1, 5):
                engine.tokens_per_output = tokens_per_output
                lines = (await http.post("/v1/chat/completions", json=CHAT | asked | {"stream": True})).text.split("\n\n")
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
                for content, calls, finish in streamed(chunks):
                    assert (content or None, calls, finish) == (wanted[0] or None, *wanted[1:])
                if asked.get("logprobs"):
                    num = sum(len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks if has_logprobs(chunk))
                    assert num == len(whole.json()["choices"][0]["logprobs"]["content"])

    run(check())


def has_logprobs(chunk: dict[str, Any]) -> bool:
    return chunk["choices"][0]["logprobs"] is not None


def streamed(chunks: list[dict[str, Any]]) -> list[Shown]:
    """What clients put together of a stream, for each choice."""
    contents, finishes, calls = defaultdict[int, str](str), dict[int, str](), defaultdict[int, list[tuple[str, str]]](list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        index, delta = choice["index"], choice["delta"]
        contents[index] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls[index]):
                assert part["id"].startswith("call_")
                assert part["type"] == "function"
                calls[index].append((part["function"]["name"], part["function"]["arguments"]))
            else:
                assert part.keys() == {"index", "function"}
                name, arguments = calls[index][part["index"]]
                calls[index][part["index"]] = name, arguments + part["function"]["arguments"]
        if choice["finish_reason"]:
            finishes[index] = choice["finish_reason"]
    return [(contents[index], calls[index], finish) for index, finish in finishes.items()]


def test_an_answer_that_ends_in_its_call_says_so(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, CALL, max_model_len=4096)
        num = len(tokenizer.encode(CALL[: CALL.index("K}")], add_special_tokens=False))
        async with (
            serving(engine, tokenizer, call_format=FORMATS["hermes"]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            for length, content, calls in ((num, None, [("weather", '{"city": "')]), (8, CALL, [])):
                choice = (await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": length})).json()["choices"][0]
                assert choice["finish_reason"] == "length"
                assert parsed(choice["message"])[1] == calls
                if content is not None:
                    assert content.startswith(choice["message"]["content"])

    run(check())


def test_arguments_come_in_pieces_and_text_before_them_at_once(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, f"the fox {CALL}", max_model_len=4096)
        async with serving(engine, tokenizer, call_format=FORMATS["hermes"]) as served:
            stream = await served.client.chat.completions.create(**CHAT, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            said = [delta.content for delta in deltas if delta.content]
            assert len(said) > 1
            assert "".join(said) == "the fox"
            parts = [part for delta in deltas for part in delta.tool_calls or []]
            assert len(parts) > 5
            assert all(part.function is not None and part.function.arguments for part in parts)

    run(check())


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its marks are special tokens."""
    directory = train_byte_level(tmp_path_factory.mktemp("mistral"))
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[PREFIX]"])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("text", "asked", "wanted"),
    [
        (f"fox[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", {}, ("fox", [WEATHER])),
        (f"fox[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", {"skip_special_tokens": False}, ("fox", [WEATHER])),
        (f"[PREFIX]fox[TOOL_CALLS]x[ARGS]{ARGUMENTS}", {}, (f"foxx{ARGUMENTS}", [])),
        ("[PREFIX]fox[TOOL_CALLS]x[ARGS]", {"skip_special_tokens": False}, ("[PREFIX]fox[TOOL_CALLS]x[ARGS]", [])),
        (f"fox[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", {"tool_choice": "none"}, (f"foxweather{ARGUMENTS}", [])),
    ],
)
def test_marks_that_are_special_tokens_are_found_and_not_shown(
    mistral: Tokenizer, text: str, asked: dict[str, Any], wanted: tuple[str, Any]
) -> None:
    async def check() -> None:
        engine = FakeEngine(mistral, text, max_model_len=4096)
        async with (
            serving(engine, mistral, call_format=FORMATS["mistral"]) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            answer = await http.post("/v1/chat/completions", json=CHAT | asked)
            shown = parsed(answer.json()["choices"][0]["message"])
            if asked.get("skip_special_tokens") is False:  # nor is the end of the answer skipped
                shown = (shown[0] or "").removesuffix("</s>"), shown[1]
            assert shown == wanted

    run(check())


def test_without_a_format_a_call_is_text(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, CALL, max_model_len=4096)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            [choice] = (await http.post("/v1/chat/completions", json=CHAT)).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}

    run(check())


@pytest.mark.parametrize(
    ("text", "asked", "call_format", "wanted"),
    [
        (CALL, {"n": 2}, FORMATS["hermes"], {"called": 2}),
        ("fox", {}, FORMATS["hermes"], {"text": 1}),
        (CALL, {"stop": "city"}, FORMATS["hermes"], {"cut": 1}),
        (CALL, {"n": 2}, None, {"unread": 2}),
        (ARGUMENTS, {"tools": CHAT["tools"][:1], "tool_choice": "required"}, None, {"forced": 1}),
        (CALL, {"tool_choice": "none"}, None, {}),
        (CALL, {"tools": []}, None, {}),
    ],
)
def test_answers_with_tools_are_counted_by_what_they_are(
    tokenizer: Tokenizer, text: str, asked: dict[str, Any], call_format: ModelFormat | None, wanted: dict[str, int]
) -> None:
    async def check() -> None:
        async with (
            serving(FakeEngine(tokenizer, text, max_model_len=4096), tokenizer, call_format=call_format) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            for number, stream in ((1, False), (2, True)):
                answer = await http.post("/v1/chat/completions", json=CHAT | asked | {"stream": stream})
                assert answer.status_code == 200, answer.text
                shown = served.metrics.text()
                for name in ("called", "cut", "text", "unread", "forced"):
                    assert f'jdisagg_tool_answers_total{{outcome="{name}"}} {number * wanted.get(name, 0)}.0' in shown

    run(check())
