"""`truncate_prompt_tokens`: of a longer prompt its last tokens alone are the prompt, or its first ones."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jdisagg.api.generation.context_length import MOST_CUT_CHARACTERS
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import common_pb2, generation_pb2
from tests.unit.api_edge.fakes import FakeEngine, run, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "the quick brown fox jumps over the lazy dog, and the dog is quick"
CONTEXT = 200


def _ask(
    tokenizer: Tokenizer, path: str, *bodies: dict[str, Any], max_new_tokens: int | None = None
) -> tuple[list[httpx.Response], list[tuple[int, ...]]]:
    """The answers, and the prompts that the engine got."""
    engine = FakeEngine(tokenizer, "fox", max_model_len=CONTEXT)

    async def asked() -> list[httpx.Response]:
        async with (
            serving(engine, tokenizer, max_new_tokens=max_new_tokens) as served,
            httpx.AsyncClient(base_url=served.http) as http,
        ):
            return [await http.post(path, json=body) for body in bodies]

    return run(asked()), [request.prompt_token_ids for request in engine.requests]


def test_a_text_keeps_its_last_tokens_and_what_is_put_before_it(tokenizer: Tokenizer) -> None:
    bos, *ids = tokenizer.encode(TEXT)
    bodies = [{"prompt": TEXT, "truncate_prompt_tokens": most} for most in (1, 5, len(ids), len(ids) + 1, len(ids) + 9, None)]
    answers, prompts = _ask(tokenizer, COMPLETIONS, *bodies, bodies[1] | {"add_special_tokens": False})
    whole = (bos, *ids)
    assert prompts == [(bos,), (bos, *ids[-4:]), (bos, *ids[1:]), whole, whole, whole, tuple(ids[-5:])]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in prompts]


def test_token_ids_and_each_of_several_prompts_are_cut_alike(tokenizer: Tokenizer) -> None:
    ids = list(range(3, 3 + CONTEXT))
    (answer,), prompts = _ask(tokenizer, COMPLETIONS, {"prompt": [ids, TEXT, ids[:3]], "truncate_prompt_tokens": 4})
    assert answer.status_code == 200, "of more than the context, too"
    assert prompts == [tuple(ids[-4:]), tokenizer.encode(TEXT, most=4), tuple(ids[:3])]


def test_a_chat_is_cut_where_its_template_was_filled(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]}
    _, (whole, cut) = _ask(tokenizer, CHAT, body, body | {"truncate_prompt_tokens": 7})
    assert cut == whole[-7:]


def test_the_first_tokens_are_kept_where_the_right_side_is_cut(tokenizer: Tokenizer) -> None:
    bos, *ids = tokenizer.encode(TEXT)
    asked = {"prompt": [TEXT, ids, ids[:3]], "truncate_prompt_tokens": 4}
    bodies = [asked | {"truncation_side": side} for side in ("right", "left", None)]
    _, prompts = _ask(tokenizer, COMPLETIONS, *bodies)
    short = tuple(ids[:3])
    left = [(bos, *ids[-3:]), tuple(ids[-4:]), short]
    assert prompts == [(bos, *ids[:3]), tuple(ids[:4]), short, *left, *left]
    body = {"messages": [{"role": "user", "content": TEXT}], "truncation_side": "right"}
    _, (whole, cut) = _ask(tokenizer, CHAT, body, body | {"truncate_prompt_tokens": 7})
    assert cut == whole[:7]


def test_an_echo_is_of_the_beginning_where_that_is_kept(tokenizer: Tokenizer) -> None:
    asked = {"prompt": TEXT, "echo": True, "max_tokens": 1, "truncate_prompt_tokens": 5, "truncation_side": "right"}
    (answer,), (prompt,) = _ask(tokenizer, COMPLETIONS, asked)
    echoed = tokenizer.decode(prompt)
    assert TEXT.startswith(echoed)
    assert answer.json()["choices"][0]["text"].startswith(echoed)


@pytest.mark.parametrize(("max_tokens", "left"), [(None, 16), (50, 50), (CONTEXT - 1, CONTEXT - 1)])
def test_as_many_as_fit_beside_the_answer_are_kept(tokenizer: Tokenizer, max_tokens: int | None, left: int) -> None:
    text = TEXT * 20
    asked = {"prompt": text, "max_tokens": max_tokens, "truncate_prompt_tokens": -1}
    (answer, short), (prompt, other) = _ask(tokenizer, COMPLETIONS, asked, asked | {"prompt": "the", "max_tokens": 1})
    assert (answer.status_code, short.status_code) == (200, 200)
    assert prompt == tokenizer.encode(text, most=CONTEXT - left)
    assert len(prompt) == CONTEXT - left
    assert other == tokenizer.encode("the")


@pytest.mark.parametrize("recommended", [None, 3, CONTEXT])
def test_a_chat_whose_answer_may_be_all_of_the_context_keeps_its_prompt(tokenizer: Tokenizer, recommended: int | None) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]}
    cut = body | {"truncate_prompt_tokens": -1}
    answers, (whole, kept) = _ask(tokenizer, CHAT, body, cut, max_new_tokens=recommended)
    assert kept == whole
    asked = {"messages": [{"role": "user", "content": TEXT * 20}], "truncate_prompt_tokens": -1}
    (answer,), (long,) = _ask(tokenizer, CHAT, asked, max_new_tokens=recommended)
    assert [answer.status_code for answer in (*answers, answer)] == [200] * 3
    assert len(long) == CONTEXT - 16


def test_what_does_not_fit_when_it_is_cut_is_refused_as_ever(tokenizer: Tokenizer) -> None:
    asked = {"prompt": TEXT * 20, "max_tokens": 50}
    bodies = [asked | {"truncate_prompt_tokens": CONTEXT - 49}, asked | {"max_tokens": CONTEXT, "truncate_prompt_tokens": -1}]
    answers, prompts = _ask(tokenizer, COMPLETIONS, *bodies)
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
        (400, "context_length_exceeded")
    ] * 2
    assert prompts == []


def test_an_echo_is_of_what_the_model_got(tokenizer: Tokenizer) -> None:
    asked = {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 1, "truncate_prompt_tokens": 5}
    (answer,), (prompt,) = _ask(tokenizer, COMPLETIONS, asked)
    [choice] = answer.json()["choices"]
    echoed = tokenizer.decode(prompt)
    assert TEXT.endswith(echoed)
    assert choice["text"].startswith(echoed)
    assert len(choice["logprobs"]["tokens"]) == 5 + 1
    assert choice["logprobs"]["text_offset"][-1] == len(echoed)


def test_an_echo_of_what_was_not_cut_is_the_text_that_came(tokenizer: Tokenizer) -> None:
    asked = {"prompt": "the </s>fox", "echo": True, "max_tokens": 1, "truncate_prompt_tokens": CONTEXT - 1}
    (answer,), _ = _ask(tokenizer, COMPLETIONS, asked)
    assert answer.json()["choices"][0]["text"].startswith("the </s>fox")


def test_long_texts_may_be_cut_and_the_longest_may_not(tokenizer: Tokenizer) -> None:
    longer_than_the_context = "the " * CONTEXT * 20
    longest = "x" * (MOST_CUT_CHARACTERS + 1)
    bodies = [{"prompt": prompt, "truncate_prompt_tokens": 3} for prompt in (longer_than_the_context, longest)]
    (cut, refused), prompts = _ask(tokenizer, COMPLETIONS, *bodies)
    assert (cut.status_code, len(prompts), len(prompts[0])) == (200, 1, 3)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"at most {MOST_CUT_CHARACTERS} characters" in error["message"]


@pytest.mark.parametrize("most", [0, -2, 2**31, 1.5, "4", True])
def test_no_other_number_is_taken(tokenizer: Tokenizer, most: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "the"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        (answer,), prompts = _ask(tokenizer, path, body | {"truncate_prompt_tokens": most})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
        assert prompts == []


def test_a_prompt_is_cut_over_grpc(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, "fox", max_model_len=CONTEXT)

    async def check() -> None:
        async with serving(engine, tokenizer) as served:
            sampling = common_pb2.SamplingParams(max_tokens=9)
            for most in (0, 4, -1):
                request = generation_pb2.GenerateRequest(text=TEXT * 3, sampling=sampling, truncate_prompt_tokens=most)
                *_, last = [response async for response in served.stub.Generate(request)]
                assert last.complete.usage.prompt_tokens == len(engine.requests[-1].prompt_token_ids)

    run(check())
    whole = tokenizer.encode(TEXT * 3)
    fits = tokenizer.encode(TEXT * 3, most=CONTEXT - 9)
    assert [request.prompt_token_ids for request in engine.requests] == [whole, tokenizer.encode(TEXT * 3, most=4), fits]
