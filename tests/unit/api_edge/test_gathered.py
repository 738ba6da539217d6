"""Answers that are not streamed: their outputs are read many at once, and nothing else differs."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from jdisagg.api.generation.choice import Transcript
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.gathered import in_one
from jdisagg.api.generation.intake import TextRequest
from jdisagg.core.errors import Unavailable
from jdisagg.core.requests import FinishReason, Output, SamplingParams
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, choice_text, run

PROMPT = (0, 5, 6)
ENGINE = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=40)


def _request(**fields: object) -> TextRequest:
    return TextRequest(**({"request_id": "r", "prompts": (PROMPT,), "sampling": ENGINE} | fields))  # pyright: ignore[reportArgumentType]


async def _outputs(tokenizer: Tokenizer) -> list[Output]:
    """Of an answer that ends by EOS, with all that can be asked for; characters of two tokens among them."""
    engine = FakeEngine(tokenizer, "the quick é brown 🦊 fox")
    [request] = (await Edge(engine, tokenizer).admit(_request())).requests
    return [output async for output in engine.generate(request)]


def _transcript(tokenizer: Tokenizer, outputs: list[Output]) -> Transcript:
    choice = choice_text(tokenizer, PROMPT, echo_text="echo ", stop_token_ids=(1,))
    transcript = Transcript(1, n=1, num_prompt_tokens=len(PROMPT))
    for output in outputs:
        transcript.add(choice.absorb(output))
    return transcript


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_of_gathered_outputs_is_the_one_of_single_ones(tokenizer: Tokenizer, size: int) -> None:
    async def check() -> None:
        outputs = await _outputs(tokenizer)
        joined = [in_one(outputs[begin : begin + size]) for begin in range(0, len(outputs), size)]
        few = [output for output in joined if isinstance(output, Output)]
        assert len(outputs) > 10
        assert len(few) == len(joined) == -(-len(outputs) // size)
        got, wanted = _transcript(tokenizer, few), _transcript(tokenizer, outputs)
        assert wanted.is_finished
        assert got.choices[0].text == wanted.choices[0].text
        got.choices[0].texts = wanted.choices[0].texts
        assert got.choices == wanted.choices
        assert got.usage == wanted.usage

    run(check())


def test_an_error_ends_what_was_gathered_and_nothing_that_has_ended() -> None:
    error, token = Unavailable("gone"), Output(request_id="r", token_ids=(5,))
    last = Output(request_id="r", token_ids=(6,), finish=FinishReason.LENGTH)
    assert in_one([token, error, last]) is error
    assert in_one([token, last, error]) == Output(request_id="r", token_ids=(5, 6), finish=FinishReason.LENGTH)
    failed = Output(request_id="r", finish=FinishReason.ERROR, error=error)
    assert in_one([token, failed]) == Output(request_id="r", token_ids=(5,), finish=FinishReason.ERROR, error=error)


@pytest.mark.parametrize(("stop", "gathered"), [((), True), (("own",), False)])
def test_an_answer_that_nobody_reads_as_it_comes_is_gathered_unless_a_stop_string_may_end_it(
    tokenizer: Tokenizer, stop: tuple[str, ...], gathered: bool
) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        edge = Edge(engine, tokenizer)
        await edge.complete(await edge.admit(_request(n=2, stop=stop)))
        assert [request.gathered for request in engine.requests] == [gathered] * 2

    run(check())


def test_an_answer_that_is_streamed_is_not_gathered(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        engine = FakeEngine(tokenizer, "fox")
        edge = Edge(engine, tokenizer)
        async with aclosing(edge.stream(await edge.admit(_request()))) as deltas:
            async for _ in deltas:
                pass
        assert [request.gathered for request in engine.requests] == [False]

    run(check())
