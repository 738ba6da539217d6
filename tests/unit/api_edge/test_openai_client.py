"""The public `openai` client against the real server, with tokens known beforehand."""

from __future__ import annotations

import asyncio
from time import monotonic

import openai
import pytest

from jdisagg.core.errors import DeadlineExceeded, HandoffLost, NumericalError, Overloaded
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, PROVENANCE, FakeEngine, run, serving

ANSWER = "the quick brown fox 😀 jumps é"


def test_completion_text_usage_and_finish(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="hello world", max_tokens=100)
            num_tokens = len(tokenizer.encode(ANSWER))  # BOS counted here stands for EOS there
            assert answer.choices[0].text == ANSWER
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == num_tokens
            assert answer.usage.prompt_tokens == len(tokenizer.encode("hello world"))
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 2
            [request] = served.engine.requests
            assert request.prompt_token_ids == tokenizer.encode("hello world")
            assert request.sampling.seed == 77
            assert served.engine.cancelled == []

    run(check())


def test_completion_stops_at_sixteen_tokens_by_default(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER * 2), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="hello")
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 16

    run(check())


def test_streamed_completion_joins_to_the_whole_and_reports_usage(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            stream = await served.client.completions.create(
                model="tiny", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
            assert "".join(texts) == ANSWER
            assert len(texts) > 5
            assert not any("\ufffd" in text for text in texts)
            assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(ANSWER))
            assert all(chunk.usage is None for chunk in chunks[:-1])

    run(check())


def test_chat_uses_the_template_and_the_rest_of_the_context(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            answer = await served.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
            )
            assert answer.choices[0].message.content == ANSWER
            assert answer.choices[0].message.role == "assistant"
            [request] = served.engine.requests
            prompt = "<s><|user|>hello</s>\n<|assistant|>"
            assert request.prompt_token_ids == tokenizer.encode(prompt, add_special_tokens=False)
            assert request.sampling.max_tokens == 200 - len(request.prompt_token_ids)

    run(check())


def test_streamed_chat_begins_with_the_role_and_ends_with_a_reason(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            stream = await served.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=5, stream=True
            )
            choices = [chunk.choices[0] async for chunk in stream]
            assert choices[0].delta.role == "assistant"
            assert all(choice.delta.role is None for choice in choices[1:])
            tokens = tokenizer.encode(ANSWER, add_special_tokens=False)[:5]
            assert "".join(choice.delta.content or "" for choice in choices) == tokenizer.decode(tokens)
            assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
            assert choices[-1].finish_reason == "length"
            assert all(choice.delta.content is not None for choice in choices), "clients read it of each chunk of a text"

    run(check())


def test_choices_share_the_seed_and_differ_in_number(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "hello", "world", "fox"), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt=["the", "dog"], n=3, seed=5)
            assert [choice.text for choice in answer.choices] == ["hello", "world", "fox"] * 2
            assert [choice.index for choice in answer.choices] == list(range(6))
            requests = sorted(served.engine.requests, key=lambda request: request.request_id)
            assert [request.choice for request in requests] == [0, 1, 2] * 2
            assert {request.sampling.seed for request in requests} == {5}
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(tokenizer.encode("the")) + len(tokenizer.encode("dog"))
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 4

    run(check())


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
def test_a_stop_string_across_tokens_is_trimmed_and_cancels_the_engine(tokenizer: Tokenizer, tokens_per_output: int) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER * 3)
        engine.tokens_per_output = tokens_per_output
        async with serving(engine, tokenizer) as served:
            answer = await served.client.completions.create(
                model="tiny", prompt="hello", max_tokens=150, stop=["never", "own f"]
            )
            assert answer.choices[0].text == "the quick br"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].model_dump()["stop_reason"] == "own f"
            text = ""
            stream = await served.client.completions.create(
                model="tiny", prompt="hello", max_tokens=150, stop="own f", stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            assert text == "the quick br"
            await served.wait_idle()
            assert len(engine.cancelled) == (2 if tokens_per_output < 100 else 0)  # the last one ends by itself
            assert answer.usage is not None
            assert answer.usage.completion_tokens < len(tokenizer.encode("the quick brown fox"))

    run(check())


def test_text_that_might_become_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "hello wor"), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="the", stop="world")
            assert answer.choices[0].text == "hello wor"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].model_dump()["stop_reason"] is None

    run(check())


@pytest.mark.parametrize(("named", "told"), [([EOS], EOS), ([EOS + 8], None), ([], None)])
def test_stop_reason_tells_a_token_the_client_named_and_not_the_end_of_the_model_s_answer(
    tokenizer: Tokenizer, named: list[int], told: int | None
) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "hello"), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="the", extra_body={"stop_token_ids": named})
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].model_dump()["stop_reason"] == told

    run(check())


def test_completion_logprobs_and_offsets(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "hello 😀!"), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="the", logprobs=1)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            tokens = (*tokenizer.encode("hello 😀!", add_special_tokens=False), 1)
            assert logprobs.token_logprobs == [-(i + 1.0) for i in range(len(tokens))]
            assert logprobs.tokens == [tokenizer.token_text(token) for token in tokens]
            assert logprobs.text_offset is not None
            assert logprobs.text_offset[0] == 0
            assert answer.choices[0].text[logprobs.text_offset[-2] :] == "!"
            assert logprobs.top_logprobs is not None
            assert all(top[tokenizer.token_text(i + 2)] == -0.25 for i, top in enumerate(logprobs.top_logprobs))

    run(check())


def test_chat_logprobs_carry_bytes(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "😀"), tokenizer) as served:
            answer = await served.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content[:-1])
            assert spelled == "😀".encode()
            assert [entry.top_logprobs[0].logprob for entry in logprobs.content] == [-0.25] * len(logprobs.content)
            assert [len(request.prompt_token_ids) > 0 for request in served.engine.requests] == [True]

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt_generates_nothing(tokenizer: Tokenizer, stream: bool) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            prompt = tokenizer.encode("the lazy dog")
            fields = {"model": "tiny", "prompt": list(prompt), "max_tokens": 0, "echo": True, "logprobs": 1}
            if stream:
                chunks = [c async for c in await served.client.completions.create(**fields, stream=True)]  # type: ignore[call-overload]
                choice = chunks[0].choices[0]
                assert len(chunks) == 1
            else:
                answer = await served.client.completions.create(**fields)  # type: ignore[call-overload]
                choice = answer.choices[0]
                assert answer.usage.completion_tokens == 0
            assert choice.logprobs is not None
            assert choice.logprobs.text_offset is not None
            assert choice.text == "the lazy dog"
            assert choice.finish_reason == "length"
            assert choice.logprobs.token_logprobs == [None] + [-0.5] * (len(prompt) - 1)
            assert choice.logprobs.tokens == [tokenizer.token_text(token) for token in prompt]
            assert choice.logprobs.text_offset[:2] == [0, 0]  # BOS is not shown
            assert served.engine.requests[0].sampling.max_tokens == 1

    run(check())


def test_echo_puts_the_prompt_first(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, " world"), tokenizer) as served:
            answer = await served.client.completions.create(model="tiny", prompt="hello", echo=True, logprobs=0, n=2)
            assert [choice.text for choice in answer.choices] == ["hello world"] * 2
            logprobs = answer.choices[1].logprobs
            assert logprobs is not None
            assert logprobs.text_offset is not None
            first = len(tokenizer.encode("hello"))
            assert logprobs.text_offset[first] == len("hello")

    run(check())


def test_parameters_reach_the_engine(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            await served.client.completions.create(
                model="tiny",
                prompt="the",
                temperature=0.5,
                top_p=0.9,
                presence_penalty=1,
                frequency_penalty=-1,
                logit_bias={"7": 3, "5": -100},
                seed=2**32 + 3,
                extra_body={
                    "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True,
                    "stop_token_ids": [9], "priority": -2, "cache_salt": "s", "no_such_field": {},
                    "timeout_s": 7.5,
                },
            )  # fmt: skip
            [request] = served.engine.requests
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
            assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
            assert sampling.logit_bias == ((5, -100), (7, 3))
            assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (3, 2, True, (9,))
            assert (request.priority, request.cache_salt) == (-2, "s")
            assert 0 < request.deadline_s - monotonic() <= 7.5

    run(check())


def test_where_it_was_computed_is_told_on_request(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer) as served:
            headers = {"x-jdisagg-provenance": "1"}
            whole = await served.client.completions.create(model="tiny", prompt="the", extra_headers=headers)
            assert whole.model_dump()["jdisagg"]["prefill_worker"] == PROVENANCE.prefill_worker
            stream = await served.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True, extra_headers=headers
            )
            chunks = [chunk.model_dump() async for chunk in stream]
            assert chunks[-1]["jdisagg"]["transferred_bytes"] == 99
            assert not any("jdisagg" in chunk for chunk in chunks[:-1])
            plain = await served.client.completions.create(model="tiny", prompt="the")
            assert "jdisagg" not in plain.model_dump()

    run(check())


def test_sixty_four_streams_at_once(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.delay_s = 0.001
        async with serving(engine, tokenizer) as served:

            async def one() -> str:
                stream = await served.client.completions.create(model="tiny", prompt="the", max_tokens=100, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            assert await asyncio.gather(*(one() for _ in range(64))) == [ANSWER] * 64
            assert engine.cancelled == []

    run(check())


def test_refusals_and_failures_have_their_status(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        async with serving(engine, tokenizer) as served:
            engine.refusal = Overloaded("the queue is full", retry_after_s=2.5)
            with pytest.raises(openai.RateLimitError) as full:
                await served.client.completions.create(model="tiny", prompt="the", stream=True)
            assert full.value.response.headers["retry-after"] == "3"
            engine.refusal = None
            engine.failure = (3, NumericalError("NaN logits at step 3, layer 1"))
            with pytest.raises(openai.InternalServerError, match="NaN logits"):
                await served.client.completions.create(model="tiny", prompt="the", n=2)
            stream = await served.client.completions.create(model="tiny", prompt="the", stream=True)
            texts = []
            try:
                async for chunk in stream:
                    texts.append(chunk.choices[0].text)
            except openai.APIError as error:
                texts.append(f"|{error.message}")
            tokens = tokenizer.encode(ANSWER, add_special_tokens=False)[:3]
            assert "".join(texts) == tokenizer.decode(tokens) + "|NaN logits at step 3, layer 1"

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_does_not_repeat_what_its_deadline_ended(tokenizer: Tokenizer, stream: bool) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, ANSWER)
        engine.failure = (0, DeadlineExceeded("the deadline passed"))
        async with serving(engine, tokenizer) as served:
            client = served.client.with_options(max_retries=2)
            with pytest.raises(openai.InternalServerError) as late:
                await client.completions.create(model="tiny", prompt="the", stream=stream)
            assert late.value.status_code == 504
            told = "the deadline passed; a deadline is the request's timeout_s, and at most --default-deadline-s of the server"
            assert f"{told}, or --request-timeout-s of a batch without one" in late.value.message
            assert len(engine.requests) == 1
            engine.failure = (0, HandoffLost("the KV is lost"))
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="tiny", prompt="the", stream=stream)
            assert len(engine.requests) == 1 + 3, "another try may end well"

    run(check())


def test_an_api_key_is_needed_where_one_is_set(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer, api_key="secret") as served:
            assert (await served.client.completions.create(model="tiny", prompt="the")).choices[0].text == "fox"
            wrong = served.client.with_options(api_key="other")
            with pytest.raises(openai.AuthenticationError):
                await wrong.completions.create(model="tiny", prompt="the")
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()

    run(check())


def test_the_key_of_clients_opens_the_api(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        keys = {"api_key": "secret\nn3xt", "client_api_key": "cl1ent\nan0ther"}
        async with serving(FakeEngine(tokenizer, "fox"), tokenizer, **keys) as served:
            for key in ("secret", "n3xt", "cl1ent", "an0ther"):
                client = served.client.with_options(api_key=key)
                assert (await client.completions.create(model="tiny", prompt="the")).choices[0].text == "fox"
            for key in ("other", "secretcl1ent", "secret\\nn3xt"):
                with pytest.raises(openai.AuthenticationError):
                    await served.client.with_options(api_key=key).models.list()

    run(check())


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_gives_the_tokens_of_the_prompt_once_at_its_beginning(tokenizer: Tokenizer, n: int) -> None:
    async def check() -> None:
        async with serving(FakeEngine(tokenizer, ANSWER), tokenizer) as served:
            asked = {"model": "tiny", "max_tokens": 5, "stream": True, "n": n, "extra_body": {"return_token_ids": True}}
            chunks = [c.model_dump() async for c in await served.client.completions.create(prompt="hello world", **asked)]
            prompt = list(served.engine.requests[0].prompt_token_ids)
            for index in range(n):
                shown = [c["choices"][0]["prompt_token_ids"] for c in chunks if c["choices"][0]["index"] == index]
                assert shown == [prompt] + [None] * (len(shown) - 1)
            messages = [{"role": "user", "content": "hello"}]
            stream = await served.client.chat.completions.create(messages=messages, **asked)
            chunks = [c.model_dump() async for c in stream]
            prompt = list(served.engine.requests[-1].prompt_token_ids)
            assert [c.get("prompt_token_ids") for c in chunks] == [prompt] + [None] * (len(chunks) - 1)
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"

    run(check())
