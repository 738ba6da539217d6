"""`include_stop_str_in_output`: the text of an answer ends with what ended it, over every edge and however it was cut."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jdisagg.core.requests import FinishReason, Output
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import EOS, FakeEngine, choice_text, run, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
ANSWER, STOP, SHOWN = "the quick brown fox jumps", "own f", "the quick brown f"
ASKED: dict[str, Any] = {"stop": ["never", STOP], "max_tokens": 100, "include_stop_str_in_output": True}


def _text(choice: dict[str, Any]) -> str:
    """Of a choice of either endpoint, or of a chunk of it."""
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens_per_output", [1, 3, 50])
def test_the_stop_string_ends_the_text_whole_and_streamed(tokenizer: Tokenizer, path: str, tokens_per_output: int) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.tokens_per_output = tokens_per_output
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            for fields in (ASKED, ASKED | {"return_token_ids": True}):
                [whole] = (await http.post(path, json=PROMPTS[path] | fields)).json()["choices"]
                assert (_text(whole), whole["finish_reason"], whole["stop_reason"]) == (SHOWN, "stop", STOP)
                streamed = _events(await http.post(path, json=PROMPTS[path] | fields | {"stream": True}))
                assert "".join(map(_text, streamed)) == SHOWN
                assert (streamed[-1]["finish_reason"], streamed[-1]["stop_reason"]) == ("stop", STOP)
            [trimmed] = (await http.post(path, json=PROMPTS[path] | ASKED | {"include_stop_str_in_output": False})).json()[
                "choices"
            ]
            assert _text(trimmed) == SHOWN.removesuffix(STOP)

    run(check())


def test_tokens_and_their_log_probabilities_are_those_up_to_the_stop_string(tokenizer: Tokenizer) -> None:
    """As without it: tokens of a stop string count, and the last one may reach beyond it."""

    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            body = PROMPTS[COMPLETIONS] | ASKED | {"logprobs": 0, "return_token_ids": True}
            [choice] = (await http.post(COMPLETIONS, json=body)).json()["choices"]
            [trimmed] = (await http.post(COMPLETIONS, json=body | {"include_stop_str_in_output": False})).json()["choices"]
            assert trimmed["text"] + STOP == choice["text"]
            assert (trimmed["token_ids"], trimmed["logprobs"]) == (choice["token_ids"], choice["logprobs"])
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert "".join(tokens).startswith(choice["text"])
            assert not "".join(tokens[:-1]).startswith(choice["text"])
            for token, offset in zip(tokens[:-1], offsets, strict=False):
                assert choice["text"][offset : offset + len(token)] == token
            assert offsets[-1] < len(choice["text"])

    run(check())


def test_a_stop_string_is_shown_over_grpc(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            request = generation_pb2.GenerateRequest(text="hi", stop=[STOP], sampling=common_pb2.SamplingParams(max_tokens=100))
            for is_shown, expected in ((False, SHOWN.removesuffix(STOP)), (True, SHOWN)):
                request.include_stop_str_in_output = is_shown
                *deltas, last = [response async for response in served.stub.Generate(request)]
                [choice] = last.complete.choices
                assert (choice.text, choice.stop) == (expected, STOP)
                assert "".join(delta.delta.text for delta in deltas) == expected

    run(check())


def test_the_text_of_a_stop_token_is_shown_where_it_has_one(tokenizer: Tokenizer) -> None:
    """As in vLLM; that of a special token is left out as anywhere else, unless the client wants to see such."""
    a, x = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ax")
    for stop_id, skips, expected in ((x, True, "ax"), (EOS, True, "a"), (EOS, False, f"a{tokenizer.token_text(EOS)}")):
        choice = choice_text(tokenizer, stop_token_ids=(stop_id,), skip_special_tokens=skips, shows_stop=True)
        output = Output(request_id="r", token_ids=(a, stop_id), finish=FinishReason.STOP, stop_token_id=stop_id)
        delta = choice.absorb(output)
        assert (delta.text, delta.token_ids, delta.stop) == (expected, (a, stop_id), stop_id)
