"""Echoed prompts: offsets point at what the answer shows, and scores that were asked for are in it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, FakeEngine, run, serving

ECHO = {"echo": True, "logprobs": 0, "max_tokens": 2}


def _choice(tokenizer: Tokenizer, body: dict[str, Any], answer: str = "hello world") -> dict[str, Any]:
    async def check() -> dict[str, Any]:
        engine = FakeEngine(tokenizer, answer)
        async with serving(engine, tokenizer) as served, httpx.AsyncClient(base_url=served.http) as http:
            whole = await http.post("/v1/completions", json=body)
            assert whole.status_code == 200, whole.text
            return whole.json()["choices"][0]

    return run(check())


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("prompt", ["the fox", "</s>the fox</s>dog", "<s>the fox", "the</s>"])
def test_offsets_count_special_tokens_that_the_prompt_spells_and_no_others(
    tokenizer: Tokenizer, prompt: str, skips: bool
) -> None:
    choice = _choice(tokenizer, {"prompt": prompt, "skip_special_tokens": skips} | ECHO)
    assert choice["text"] == f"{prompt}hello world"
    scores = choice["logprobs"]
    *prompt_tokens, _, _ = shown = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    assert prompt_tokens[0] == ("<s>", 0)  # put there by the tokenizer
    first = 0 if prompt.startswith("<s>") else 1
    assert all(choice["text"].startswith(token, at) for token, at in shown[first:] if (token, at) != ("<s>", 3))


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_echoed_token_ids_are_those_of_their_text(tokenizer: Tokenizer, skips: bool) -> None:
    ids = list(tokenizer.encode("the fox</s>dog"))
    choice = _choice(tokenizer, {"prompt": ids, "skip_special_tokens": skips} | ECHO)
    scores = choice["logprobs"]
    for token, at in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert (skips and token in ("<s>", "</s>")) or choice["text"].startswith(token, at)


@pytest.mark.parametrize(("num_top", "num_prompt_top"), [(3, 0), (0, 3), (1, 2)])
def test_an_echo_has_as_many_alternatives_as_its_answer_whatever_else_is_asked_of_the_prompt(
    tokenizer: Tokenizer, num_top: int, num_prompt_top: int
) -> None:
    asked = {"prompt": "the fox", "echo": True, "logprobs": num_top, "prompt_logprobs": num_prompt_top, "max_tokens": 2}
    choice = _choice(tokenizer, asked)
    _, *shown = choice["logprobs"]["top_logprobs"]
    assert {len(alternatives) for alternatives in shown} == {num_top + 1}  # the token itself is none of the fake's
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {num_prompt_top + 1}


def test_prompt_scores_that_were_asked_for_are_in_an_echo_too(tokenizer: Tokenizer) -> None:
    asked = {"prompt": "the fox", "max_tokens": 2, "prompt_logprobs": 1}
    plain, echoed = _choice(tokenizer, asked), _choice(tokenizer, asked | {"echo": True})
    assert plain["prompt_logprobs"][1:]
    assert echoed["prompt_logprobs"] == plain["prompt_logprobs"]
    assert "prompt_logprobs" not in _choice(tokenizer, {"prompt": "the fox"} | ECHO)


@pytest.mark.parametrize(("max_tokens", "ended"), [(0, ("length", None)), (1, ("stop", EOS))])
def test_a_token_that_scoring_alone_made_stops_nothing(
    tokenizer: Tokenizer, max_tokens: int, ended: tuple[str, int | None]
) -> None:
    asked = {"prompt": "the fox", "stop_token_ids": [EOS]} | ECHO | {"max_tokens": max_tokens}
    choice = _choice(tokenizer, asked, answer="")
    assert (choice["finish_reason"], choice["stop_reason"]) == ended


@pytest.mark.parametrize("num_left", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_of_a_prompt_that_ends_within_a_character_joins_it_with_its_answer(
    tokenizer: Tokenizer, num_left: int, max_tokens: int
) -> None:
    ids = tokenizer.encode("the 😀", add_special_tokens=False)
    prompt = list(ids[: len(ids) - num_left])
    choice = _choice(tokenizer, {"prompt": prompt, "echo": True, "max_tokens": max_tokens})
    answer = tokenizer.encode("hello world", add_special_tokens=False)[:max_tokens]
    assert choice["text"] == tokenizer.decode((*prompt, *answer))
