"""What a model thinks comes beside its answer, in a stream and at once, and what the answer has to be begins behind it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from jdisagg.api.generation.sampling_bounds import MAX_GRAMMAR_BYTES
from jdisagg.api.http import chat
from jdisagg.api.http.thoughts import choose_marks
from jdisagg.core.errors import ConfigError
from jdisagg.core.requests import GrammarKind
from jdisagg.text.calls.formats import FORMATS
from jdisagg.text.thoughts import BEGIN, END
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving
from tests.unit.text.tiny_tokenizer import CHAT_TEMPLATE, train_byte_level

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = (  # as Qwen 3's: no thought where none is wanted; as DeepSeek R1's where one is
    CHAT_TEMPLATE.removesuffix("{% endif %}")
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif thinks %}<think>\n{% endif %}{% endif %}"
)
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
FORCED_CALL = '{"name":"weather","parameters":{}}'
FORCED = TOOLS | {"tool_choice": "required"}
NAMED = TOOLS | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
OPEN = {"chat_template_kwargs": {"thinks": True}}
THOUGHT = f"{BEGIN}\nwhy the fox?\n{END}\n\n"
Shown = tuple[str | None, str | None, str]  # what was thought, content, finish_reason
ENDS = {"tool_calls": "tool_calls", "called": "stop"}  # with calls: finish_reason
CASES: list[tuple[str, dict[str, Any], Shown]] = [
    (f"{THOUGHT}fox", {}, ("why the fox?", "fox", "stop")),
    (f"{THOUGHT}fox", {"n": 2, "logprobs": True}, ("why the fox?", "fox", "stop")),
    (f"{THOUGHT}fox", {"return_token_ids": True}, ("why the fox?", "fox", "stop")),
    (f"so{END}fox", OPEN, ("so", "fox", "stop")),
    (f"so{END}fox", {}, (None, f"so{END}fox", "stop")),
    ("fox  ", {}, (None, "fox  ", "stop")),
    ("", {}, (None, "", "stop")),
    (f"{BEGIN}so", {}, ("so", None, "stop")),
    (f"{BEGIN}the fox", {"stop": "fox"}, ("the ", None, "stop")),
    (f"{THOUGHT}fox", {"enable_thinking": False}, (None, f"{THOUGHT}fox", "stop")),
    (f"{THOUGHT}fox", {"include_reasoning": False}, (None, "fox", "stop")),
    (f"{THOUGHT}fox", {"reasoning": {"exclude": True}}, (None, "fox", "stop")),
    (f"{THOUGHT}fox", {"reasoning_format": "hidden"}, (None, "fox", "stop")),
    (f"{THOUGHT}fox", {"reasoning_format": "parsed", "include_reasoning": True}, ("why the fox?", "fox", "stop")),
    (f"{THOUGHT}fox", {"reasoning_format": "raw"}, (None, f"{THOUGHT}fox", "stop")),
    (f"{THOUGHT}fox", {"separate_reasoning": False}, (None, f"{THOUGHT}fox", "stop")),
    (f"{BEGIN}{CALL}?{END}{CALL}", TOOLS, (f"{CALL}?", None, "tool_calls")),
    (f"{BEGIN}{CALL}?{END}fox", TOOLS, (f"{CALL}?", "fox", "stop")),
    (f"{THOUGHT}{CALL}", TOOLS | {"separate_reasoning": False}, (None, THOUGHT, "tool_calls")),
    (f"{THOUGHT}[{FORCED_CALL}]", FORCED, ("why the fox?", None, "tool_calls")),
    (f"{THOUGHT}[{FORCED_CALL}]", FORCED | {"separate_reasoning": False}, (None, THOUGHT, "tool_calls")),
    (f"{BEGIN}[{FORCED_CALL}]", FORCED | {"separate_reasoning": False}, (None, f"{BEGIN}[{FORCED_CALL}]", "stop")),
    (f"{THOUGHT}{{}}", NAMED | {"reasoning_format": "raw"}, (None, THOUGHT, "called")),
    (f"{BEGIN}{CALL}{END}fox", TOOLS | {"separate_reasoning": False}, (None, f"{BEGIN}{CALL}{END}fox", "stop")),
    (f"{THOUGHT} fox", {"structured_outputs": {"choice": [" fox"]}}, ("why the fox?", "\n\n fox", "stop")),
    (f'{THOUGHT}{{"a": 1}}', {"response_format": {"type": "json_object"}}, ("why the fox?", '{"a": 1}', "stop")),
]


def train(directory: Path, *, special: bool = False, template: str = TEMPLATE) -> Tokenizer:
    """A tokenizer that has both marks."""
    train_byte_level(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = [tokenizers.AddedToken(mark, normalized=False, special=special) for mark in (BEGIN, END)]
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    backend.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train(tmp_path_factory.mktemp("thinker"))


@asynccontextmanager
async def asking(engine: FakeEngine, tokenizer: Tokenizer, parser: str = "auto") -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(engine, tokenizer, call_format=FORMATS["hermes"], thought_marks=choose_marks(parser, tokenizer)) as served,
        httpx.AsyncClient(base_url=served.http) as http,
    ):
        yield http


async def ask(http: httpx.AsyncClient, **asked: Any) -> dict[str, Any]:
    response = await http.post(PATH, json=CHAT | asked)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http: httpx.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    lines = (await http.post(PATH, json=CHAT | asked | {"stream": True})).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]


def joined(chunks: list[dict[str, Any]], index: int, name: str) -> str | None:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(name) or "" for choice in choices) or None


@pytest.mark.parametrize(("text", "asked", "wanted"), CASES)
def test_a_thought_is_told_from_the_answer_at_once_and_in_a_stream(
    thinker: Tokenizer, text: str, asked: dict[str, Any], wanted: Shown
) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, text, max_model_len=4096)
        async with asking(engine, thinker) as http:
            answer = await ask(http, **asked)
            for choice in answer["choices"]:
                message = choice["message"]
                assert (message["reasoning"], message["content"]) == wanted[:2]
                assert message["reasoning_content"] == wanted[0]
                assert choice["finish_reason"] == ENDS.get(wanted[2], wanted[2])
                assert bool(message.get("tool_calls")) == (wanted[2] in ENDS)
            for engine.tokens_per_output in (1, 5):
                chunks = await stream(http, **asked)
                assert all("reasoning_content" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
                for index in range(asked.get("n", 1)):
                    assert joined(chunks, index, "reasoning") == joined(chunks, index, "reasoning_content") == wanted[0]
                    assert joined(chunks, index, "content") == (wanted[1] or None)
                ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
                assert ends == [ENDS.get(wanted[2], wanted[2])] * asked.get("n", 1)
                for name, key in (("logprobs", "logprobs"), ("return_token_ids", "token_ids")):
                    if asked.get(name):
                        assert all(
                            choice.get(key) for chunk in chunks for choice in chunk["choices"] if choice["delta"].get("content")
                        )

    run(check())


def test_a_thought_that_was_begun_goes_on_where_the_message_is_continued(thinker: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, f" the fox{END}dog")
        async with asking(engine, thinker) as http:
            for content, thought, said in (
                (f"{BEGIN}why", "the fox", "dog"),
                ([{"type": "text", "text": f"{BEGIN}why"}, " so"], "the fox", "dog"),
                ([{"type": "thinking", "thinking": f"{BEGIN}why"}], "the fox", "dog"),
                ("The", None, f" the fox{END}dog"),
                ([], None, f" the fox{END}dog"),
                (f"Write {BEGIN}", None, f" the fox{END}dog"),
            ):
                messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
                answer = await ask(http, messages=messages, continue_final_message=True)
                message = answer["choices"][0]["message"]
                assert (message.get("reasoning"), message["content"]) == (thought, said)

    run(check())


def test_tokens_of_a_thought_are_counted_with_its_marks(thinker: Tokenizer) -> None:
    async def check() -> None:
        num_thought = len(thinker.encode(f"{BEGIN}\nwhy the fox?\n{END}", add_special_tokens=False))
        engine = FakeEngine(thinker, f"{THOUGHT}fox", max_model_len=4096)
        async with asking(engine, thinker) as http:
            usage = (await ask(http))["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
            assert (await ask(http, n=3))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * num_thought}
            assert (await ask(http, max_tokens=3))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
            for asked in ({"separate_reasoning": False}, {"include_reasoning": False}):
                assert (await ask(http, **asked))["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
            assert (await ask(http, enable_thinking=False))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
            for engine.tokens_per_output in (1, 4):
                options = {"include_usage": True, "continuous_usage_stats": True}
                counts = [
                    chunk["usage"]["completion_tokens_details"]["reasoning_tokens"]
                    for chunk in await stream(http, stream_options=options)
                    if chunk["usage"]["completion_tokens"]
                ]
                assert counts[-1] == num_thought
                assert counts == sorted(counts)
            engine.answers = [thinker.encode("the fox", add_special_tokens=False)]
            assert (await ask(http))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    run(check())


def test_what_the_answer_has_to_be_begins_behind_the_thought(thinker: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, f'{THOUGHT}{{"a": 1}}', max_model_len=4096)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        in_json: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        async with asking(engine, thinker) as http:
            for asked, begins in (
                (in_json, "answer: %json {"),
                (in_json | TOOLS, "answer: %lark {start: answer | calls"),
                (TOOLS | {"tool_choice": "required"}, 'answer: %lark {start: "[" call'),
                ({"structured_outputs": {"regex": "a/b"}}, r"answer: /a\/b/"),
                ({"guided_json": schema}, "answer: %json {"),
            ):
                await ask(http, **asked)
                grammar = engine.requests[-1].sampling.grammar
                assert grammar is not None
                assert grammar.kind is GrammarKind.LARK
                assert grammar.text.startswith(begins)
                assert f"start: (<[{thinker.token_id(BEGIN)}]>" in grammar.text
                assert ("{1,8}" in grammar.text) == ("structured_outputs" not in asked), "blanks are of a client's own grammar"
                await ask(http, **asked, enable_thinking=False)
                grammar = engine.requests[-1].sampling.grammar
                assert grammar is not None
                assert "start: (<[" not in grammar.text
                await ask(http, **asked, separate_reasoning=False)
                grammar = engine.requests[-1].sampling.grammar
                assert grammar is not None
                assert "start: (<[" in grammar.text, "the model thinks, wherever that is shown"
            assert f"<[^0-1,{thinker.token_id(END)}]>*" in grammar.text, "no special token and no end of the answer"
            engine.card = replace(engine.card, eos_token_ids=(1, 7))
            await ask(http, **in_json)
            grammar = engine.requests[-1].sampling.grammar
            assert grammar is not None
            assert f"<[^0-1,7,{thinker.token_id(END)}]>*" in grammar.text
            await ask(http, allowed_token_ids=[5, 6])
            grammar = engine.requests[-1].sampling.grammar
            assert grammar is not None
            assert "start: (<[" not in grammar.text, "these are all tokens of the answer"
            long = "a" * MAX_GRAMMAR_BYTES
            assert (await ask(http, structured_outputs={"regex": long}))["choices"]

    run(check())


def test_what_is_wrong_with_a_grammar_is_told_of_it_as_it_came_and_what_could_be_of_none_is_refused_at_once(
    thinker: Tokenizer,
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(thinker, "fox"), thinker, thought_marks=choose_marks("auto", thinker)) as served:
            for text in ("[fox@]", "fox"):
                with suppress(openai.BadRequestError):
                    await served.client.chat.completions.create(**CHAT, extra_body={"structured_outputs": {"regex": text}})
            assert [grammar.kind for grammar in served.grammars.prepared] == [
                GrammarKind.REGEX,
                GrammarKind.REGEX,
                GrammarKind.LARK,
            ]

    run(check())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"include_reasoning": False, "reasoning_format": "parsed"}, "reasoning_format"),
        ({"separate_reasoning": False, "reasoning": {"exclude": True}}, "reasoning"),
        ({"reasoning_format": "none", "include_reasoning": False}, "reasoning_format"),
        ({"reasoning_format": "xml"}, "reasoning_format"),
        ({"reasoning_format": 1}, "reasoning_format"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"separate_reasoning": 0}, "separate_reasoning"),
    ],
)
def test_fields_that_say_no_such_thing_or_the_opposite_of_each_other_are_refused(
    thinker: Tokenizer, asked: dict[str, Any], param: str
) -> None:
    async def check() -> None:
        async with asking(FakeEngine(thinker, "fox"), thinker) as http:
            response = await http.post(PATH, json=CHAT | asked)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param

    run(check())


def test_without_a_parser_a_thought_is_content_and_cannot_be_hidden(thinker: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, f"{THOUGHT}fox", max_model_len=4096)
        async with asking(engine, thinker, "none") as http:
            answer = await ask(http, separate_reasoning=False, structured_outputs={"regex": "fox"})
            assert answer["choices"][0]["message"]["content"] == f"{THOUGHT}fox"
            assert "completion_tokens_details" not in answer["usage"]
            assert engine.requests[-1].sampling.grammar is not None
            assert engine.requests[-1].sampling.grammar.text == "fox"
            response = await http.post(PATH, json=CHAT | {"include_reasoning": False})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "include_reasoning")
            assert "--reasoning-parser" in response.text

    run(check())


def test_marks_that_are_special_tokens_are_found_and_not_shown(tmp_path: Path) -> None:
    async def check() -> None:
        tokenizer = train(tmp_path, special=True)
        async with asking(FakeEngine(tokenizer, f"{THOUGHT}fox", max_model_len=4096), tokenizer) as http:
            for asked in ({}, {"skip_special_tokens": False}):
                message = (await ask(http, **asked))["choices"][0]["message"]
                assert message["reasoning"] == "why the fox?"
                assert message["content"].startswith("fox")
                assert BEGIN not in json.dumps(message)
            message = (await ask(http, separate_reasoning=False))["choices"][0]["message"]
            assert message["content"] == f"{THOUGHT}fox"

    run(check())


def test_a_parser_that_is_named_for_a_model_without_its_marks_ends_the_start(
    tokenizer: Tokenizer, thinker: Tokenizer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert choose_marks("auto", tokenizer) is None
    assert choose_marks("auto", train(tmp_path, template=CHAT_TEMPLATE)) is None, "others of its family think"
    with pytest.raises(ConfigError, match="--reasoning-parser: got 'deepseek_r1', but <think> and </think> are no tokens"):
        choose_marks("deepseek_r1", tokenizer)
    with caplog.at_level("INFO"):
        assert choose_marks("deepseek_r1", thinker) == choose_marks("auto", thinker)
    assert "thoughts are read between <think> and </think>" in caplog.text


def test_a_thought_without_an_answer_is_continued_as_content_alone(thinker: Tokenizer) -> None:
    async def check() -> None:
        async with asking(FakeEngine(thinker, "fox"), thinker) as http:
            for content in (None, "", []):
                cut = {"role": "assistant", "content": content, "reasoning_content": "the"}
                asked = CHAT | {"messages": [*CHAT["messages"], cut], "continue_final_message": True}
                for path in (PATH, "/tokenize"):
                    response = await http.post(path, json=asked)
                    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")
                    assert "send it as content, <think> first" in response.text

    run(check())


def test_a_stream_whose_thought_is_hidden_is_not_quiet_for_long(thinker: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        thought = f"{BEGIN}{'the fox ' * 10}{END}"
        num_thought = len(thinker.encode(thought, add_special_tokens=False))
        engine = FakeEngine(thinker, f"{thought}fox", max_model_len=4096)
        engine.delay_s = 0.002
        async with asking(engine, thinker) as http:
            before = await stream(http, include_reasoning=False)
            clock = itertools.count()
            monkeypatch.setattr(chat, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), time=time.time))
            monkeypatch.setattr(chat, "QUIET_S", 4.0)
            chunks = await stream(http, include_reasoning=False)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            num_silent = deltas.count({"reasoning_content": None, "content": None})
            assert 3 <= num_silent <= num_thought / 3, "one in some seconds"
            assert joined(chunks, 0, "content") == joined(before, 0, "content") == "fox"
            engine.answers = [thinker.encode("the é " * 20, add_special_tokens=False)]  # half a character says nothing
            deltas = [chunk["choices"][0]["delta"] for chunk in await stream(http)]
            assert deltas.count({"reasoning_content": None, "content": ""}) <= 2, "the first chunk, and the last"

    run(check())


def test_while_a_model_thinks_no_chunk_has_content(thinker: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, f"the\n\n\nfox{END}dog", max_model_len=4096)
        engine.delay_s = 0.02  # each token is a delta then
        async with asking(engine, thinker) as http:
            chunks = await stream(http, return_token_ids=True, logprobs=True, **OPEN)
            said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks if "content" in chunk["choices"][0]["delta"]]
            first = next(index for index, content in enumerate(said) if content is not None)
            assert first > 2, "there are the first chunk, and those of blanks, which may be the thought's last"
            assert "".join(said[first:]) == "dog"

    run(check())


def test_openais_client_finds_what_was_thought(thinker: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(thinker, f"{THOUGHT}fox", max_model_len=4096)
        async with serving(engine, thinker, thought_marks=choose_marks("auto", thinker)) as served:
            answer = await served.client.chat.completions.create(**CHAT)
            message = answer.choices[0].message
            assert message.content == "fox"
            assert getattr(message, "reasoning_content") == getattr(message, "reasoning") == "why the fox?"  # noqa: B009
            assert answer.usage is not None
            assert answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens

    run(check())
