"""The edge without a network: intake, stop strings, ends of streams."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from time import monotonic
from typing import Any

import pytest

from jdisagg.api.generation.choice import ChoiceResult, Delta, Transcript, Usage
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.errors import ContextLengthExceeded, InvalidRequest, RequestError
from jdisagg.core.fleet import ModelCard
from jdisagg.core.requests import EngineRequest, FinishReason, Output, SamplingParams, TokenLogprob
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import EOS, FakeEngine, choice_text, run

GREEDY = SamplingParams(temperature=0)


def _request(prompt: str | tuple[int, ...] = "the", **fields: object) -> TextRequest:
    return TextRequest(**({"request_id": "r", "prompts": (prompt,), "sampling": GREEDY} | fields))  # pyright: ignore[reportArgumentType]


def test_a_request_arrives_when_the_edge_is_asked_not_when_its_engine_is(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        engine = FakeEngine(tokenizer, "fox")
        waited = asyncio.Event()

        async def first_card(deadline_s: float) -> ModelCard:
            await waited.wait()
            return engine.card

        engine.first_card = first_card
        began_s = monotonic()
        admitted = asyncio.create_task(Edge(engine, tokenizer).admit(_request(n=2)))
        await asyncio.sleep(0)
        heard_s = monotonic()
        waited.set()
        job = await admitted
        assert all(began_s <= (one.arrived_s or 0.0) <= heard_s for one in job.requests)
        earlier = await Edge(engine, tokenizer).admit(
            _request(arrived_s=began_s - 1.0)
        )  # a chat whose rendering was waited for
        assert earlier.requests[0].arrived_s == began_s - 1.0

    run(body())


def test_drawn_seeds_differ_by_prompt_and_given_ones_do_not(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer, draw_seed=lambda: 2**32 - 1)
        drawn = await edge.admit(_request(prompts=("a", "a"), n=2))
        assert [request.sampling.seed for request in drawn.requests] == [2**32 - 1, 2**32 - 1, 0, 0]
        given = await edge.admit(_request(prompts=("a", "a"), n=2, seed=2**32 - 1))
        assert [request.sampling.seed for request in given.requests] == [2**32 - 1] * 4
        assert [request.request_id for request in given.requests] == ["r/0", "r/1", "r/2", "r/3"]
        assert given.num_prompt_tokens == 2 * len(tokenizer.encode("a"))

    run(check())


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "default", "expected"),
    [(10, None, None, 190), (10, None, 16, 16), (190, None, 16, 10), (199, 1, None, 1), (10, 190, None, 190), (10, 0, None, 1)],
)
def test_tokens_to_generate(
    tokenizer: Tokenizer, num_prompt: int, max_tokens: int | None, default: int | None, expected: int
) -> None:
    async def check() -> None:
        edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer)
        job = await edge.admit(_request((5,) * num_prompt, max_tokens=max_tokens, default_max_tokens=default, echo=True))
        assert job.requests[0].sampling.max_tokens == expected
        assert job.requests[0].fills_context is (max_tokens is None and expected == 200 - num_prompt)
        for too_long in (_request((5,) * num_prompt, max_tokens=201 - num_prompt), _request((5,) * 200)):
            with pytest.raises(ContextLengthExceeded):
                await edge.admit(too_long)

    run(check())


def test_an_id_is_taken_until_the_engine_has_let_go_of_it(tokenizer: Tokenizer) -> None:
    """Else the late cancel of a closed request would hit the next one of the same id."""

    async def check() -> None:
        engine = FakeEngine(tokenizer, "the quick brown fox")
        edge = Edge(engine, tokenizer)
        stream = edge.stream(await edge.admit(_request(n=3, max_tokens=9)))
        await anext(stream)
        assert engine.live
        assert not engine.had_enough
        closing = asyncio.ensure_future(stream.aclose())
        while not closing.done():
            assert edge._live or not engine.live
            await asyncio.sleep(0)
        assert (edge._live, engine.live) == ({}, set())
        assert engine.cancelled
        assert not engine.had_enough, "a client that leaves is an abort"

    run(check())


def test_the_shorter_deadline_wins(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        edge = Edge(FakeEngine(tokenizer, "fox"), tokenizer, default_deadline_s=50.0)
        for timeout_s, expected_s in [(None, 50.0), (5.0, 5.0), (500.0, 50.0)]:
            before_s = monotonic()
            job = await edge.admit(_request(timeout_s=timeout_s))
            assert before_s <= job.requests[0].deadline_s - expected_s <= monotonic()

    run(check())


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        edge = Edge(FakeEngine(tokenizer, "aaaa"), tokenizer)
        tokens = tokenizer.encode("aaaa", add_special_tokens=False)
        assert len(tokens) == 4
        transcript = await edge.complete(await edge.admit(_request(stop=("a",), max_tokens=9)))
        assert transcript.choices[0].text == ""
        assert edge._engine.had_enough == edge._engine.cancelled != [], "a stop is no abort"
        sampling = SamplingParams(min_tokens=3)
        transcript = await edge.complete(await edge.admit(_request(stop=("a",), max_tokens=9, sampling=sampling)))
        assert transcript.choices[0].text == "aaa"
        assert transcript.usage.completion_tokens == 4

    run(check())


def test_a_stop_string_that_begins_within_min_tokens_is_found(tokenizer: Tokenizer) -> None:
    """As in vLLM: where it ends decides."""

    async def check() -> None:
        edge = Edge(FakeEngine(tokenizer, "xyaabz"), tokenizer)
        assert len(tokenizer.encode("xyaabz", add_special_tokens=False)) == 6
        sampling = SamplingParams(min_tokens=4)
        transcript = await edge.complete(await edge.admit(_request(stop=("xy", "aab"), max_tokens=9, sampling=sampling)))
        assert (transcript.choices[0].text, transcript.choices[0].stop) == ("xy", "aab")
        assert transcript.usage.completion_tokens == 5

    run(check())


@pytest.mark.parametrize(
    ("max_tokens", "told"),
    [
        (10, "must be at most max_tokens = 10"),
        (0, "with max_tokens = 0 no token is generated; leave it out, or raise max_tokens"),
    ],
)
def test_more_min_tokens_than_max_tokens_are_refused_with_the_number_that_was_sent(
    tokenizer: Tokenizer, max_tokens: int, told: str
) -> None:
    async def check() -> None:
        asked = _request(echo=True, max_tokens=max_tokens, sampling=SamplingParams(min_tokens=20))
        with pytest.raises(InvalidRequest) as refused:
            await Edge(FakeEngine(tokenizer, "fox"), tokenizer).admit(asked)
        assert refused.value.message == f"min_tokens: {told}; got 20"

    run(check())


def test_closing_a_stream_returns_when_the_engine_is_free(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "the quick brown fox")
        edge = Edge(engine, tokenizer)
        job = await edge.admit(_request(n=3))
        async with aclosing(edge.stream(job)) as deltas:
            await anext(deltas)
            with pytest.raises(InvalidRequest, match="still running"):
                await edge.admit(_request())
            with pytest.raises(InvalidRequest, match="still running"):
                await anext(edge.stream(job))
        assert not engine.live
        assert not edge._live
        assert len(asyncio.all_tasks()) == 1
        assert edge.abort("r") is False

    run(check())


class _Silent(FakeEngine):
    """Ends its stream without a finish reason."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        yield Output(request_id=request.request_id, token_ids=(5,))


def test_a_stream_without_an_end_is_an_error(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        edge = Edge(_Silent(tokenizer, "fox"), tokenizer)
        with pytest.raises(RequestError, match="without a finish reason"):
            await edge.complete(await edge.admit(_request()))

    run(check())


def test_a_token_that_was_filtered_out_has_a_finite_logprob(tokenizer: Tokenizer) -> None:
    choice = choice_text(tokenizer)
    logprobs = (TokenLogprob(token_id=5, logprob=-math.inf, top=((6, -1.0), (7, -math.inf))),)
    delta = choice.absorb(Output(request_id="r", token_ids=(5,), logprobs=logprobs, finish=FinishReason.LENGTH))
    assert delta.logprobs[0].logprob == -9999.0
    assert delta.logprobs[0].top == ((6, -1.0), (7, -9999.0))


@pytest.mark.parametrize("special", [True, False])
def test_the_text_of_a_stop_token_is_never_shown(tokenizer: Tokenizer, special: bool) -> None:
    stop_id = EOS if special else tokenizer.encode("x", add_special_tokens=False)[0]
    choice = choice_text(tokenizer, stop_token_ids=(stop_id,), skip_special_tokens=False)
    [a] = tokenizer.encode("a", add_special_tokens=False)
    output = Output(request_id="r", token_ids=(a, stop_id), finish=FinishReason.STOP, stop_token_id=stop_id)
    delta = choice.absorb(output)
    assert (delta.text, delta.token_ids, delta.stop) == ("a", (a, stop_id), stop_id)
    transcript = Transcript(1, n=1, num_prompt_tokens=1)
    transcript.add(delta)
    assert transcript.is_finished


def test_a_prompt_counts_as_cached_as_far_as_the_choice_that_came_first_found_it_wherever_that_stands() -> None:
    for found in ((0, 8), (8, 0), (4, 8), (8, 4)):  # whoever computed it had none of it, or half; its sibling finds it all
        transcript = Transcript(4, n=2, num_prompt_tokens=18)
        for index, cached_tokens in enumerate((*found, 9, 9)):
            transcript.add(Delta(index=index, token_ids=(7,), cached_tokens=cached_tokens))
        assert transcript.usage == Usage(18, 4, min(found) + 9)


def test_a_choice_of_which_nothing_has_come_says_nothing_of_what_was_cached() -> None:
    transcript = Transcript(2, n=2, num_prompt_tokens=9)
    assert transcript.usage.cached_tokens == 0
    transcript.add(Delta(index=0, token_ids=(7,), cached_tokens=8))
    assert transcript.usage.cached_tokens == 8
    for index in (0, 1):
        transcript.add(Delta(index=index, finish=FinishReason.ABORT))
        assert transcript.usage.cached_tokens == 8
    transcript = Transcript(1, n=1, num_prompt_tokens=9)
    transcript.add(Delta(index=0, finish=FinishReason.LENGTH, cached_tokens=8))
    assert transcript.usage.cached_tokens == 8, "of a prompt that is only scored"


class Watched(list[ChoiceResult]):
    """Choices, and how often one or some of them were looked up."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[ChoiceResult]:
        self.looks += 1
        return super().__iter__()


def test_usage_with_every_chunk_does_not_look_through_all_choices() -> None:
    draw, n = random.Random(0), 3
    transcript = Transcript(30, n=n, num_prompt_tokens=99)
    found: dict[int, int] = {}
    for _ in range(300):
        index, cached_tokens = draw.randrange(30), draw.choice([0, 0, 4, 8])
        transcript.add(Delta(index=index, token_ids=(7,), cached_tokens=cached_tokens))
        found[index] = max(found.get(index, 0), cached_tokens)
        of_prompts = ([found[each] for each in range(begin, begin + n) if each in found] for begin in range(0, 30, n))
        assert transcript.usage.cached_tokens == sum(min(counts, default=0) for counts in of_prompts)
    transcript.choices = choices = Watched(transcript.choices)
    for index in range(30):
        transcript.add(Delta(index=index, token_ids=(7,), cached_tokens=0))
        assert transcript.usage.completion_tokens == 301 + index
    assert choices.looks == 30, "for what is added to, once"


def test_the_garbage_collector_goes_through_no_tokens_of_an_answer_and_few_texts() -> None:
    transcript = Transcript(1, n=1, num_prompt_tokens=2, keep="text")
    for number in range(2000):
        transcript.add(Delta(index=0, text=f"{number} ", token_ids=(number,)))
    (one,) = transcript.choices
    assert (one.text, one.token_ids.tolist()) == ("".join(f"{number} " for number in range(2000)), [*range(2000)])
    assert len(gc.get_referents(one.token_ids)) <= 1, "its type"
    assert len(one.texts) < 600
