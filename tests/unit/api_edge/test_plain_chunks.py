"""Chunks of which only the text differs are those that would have been written one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jdisagg.api.generation.choice import Delta, ScoredToken
from jdisagg.api.http.answer_json import PlainChunks, encode_event
from jdisagg.core.requests import FinishReason
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

TEXTS = [
    "a",
    ' "quoted" \\',
    "\0",
    '"\\u0000"',
    "\n\t\r\x1f\x7f",
    "\u2028\u2029\x85",
    "snow\N{SNOWMAN}\N{GRINNING FACE}",
    "</script>",
]


@pytest.mark.parametrize("model", ["demo", '"\\u0000"', "\N{SNOWMAN}"])
def test_a_plain_chunk_is_what_writing_all_of_it_gives(model: str) -> None:
    def write(delta: Delta) -> dict[str, Any]:
        choices = [{"index": delta.index, "text": delta.text, "logprobs": None}]
        return {"model": model, "fingerprint": delta.fingerprint, "choices": choices, "usage": None}

    plain = PlainChunks(write)
    for _ in range(2):
        for fingerprint in ("one", None, "other"):
            for index in (0, 3):
                for text in TEXTS:
                    delta = Delta(index=index, text=text, token_ids=(1,), fingerprint=fingerprint)
                    written = plain.chunk(delta, fingerprint)
                    assert written == encode_event(write(delta))
                    assert len(written.decode().splitlines()) == 1, "some clients read events so"
                    assert json.loads(written)["choices"][0]["text"] == text


def test_a_delta_that_says_more_than_its_text_or_nothing_is_not_plain() -> None:
    plain = PlainChunks(lambda delta: {"text": delta.text})
    scored = (ScoredToken(token_id=1, logprob=-1.0),)
    for more in ({"text": ""}, {"finish": FinishReason.STOP}, {"logprobs": scored}, {"prompt_logprobs": scored}):
        assert plain.chunk(Delta(**({"index": 0, "text": "a"} | more)), None) is None  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_have_the_same_keys_whether_or_not_they_are_plain(tokenizer: Tokenizer, include_usage: bool) -> None:
    """One that shows usage as it goes is not; the one shows null, or none, where the other has numbers."""

    async def check() -> None:
        engine = FakeEngine(tokenizer, 'the "quick" brown fox')
        async with serving(engine, tokenizer) as served:

            async def chunks(continuous: bool) -> list[dict[str, Any]]:
                options = {"include_usage": include_usage or continuous, "continuous_usage_stats": continuous}
                stream = await served.client.completions.create(
                    model="tiny", prompt="a", max_tokens=50, stream=True, stream_options=options
                )  # pyright: ignore[reportCallIssue]
                found = [chunk.model_dump(exclude_unset=True) async for chunk in stream]
                return [chunk | {"id": "", "created": 0} for chunk in found if chunk["choices"]]

            plain, full = await chunks(False), await chunks(True)
        assert len(plain) == len(full) > 3
        for one, other in zip(plain, full, strict=True):
            usage = one.pop("usage", "none")
            assert usage is None if include_usage else usage == "none"
            assert other.pop("usage")
            assert list(one) == list(other)
            assert one == other

    run(check())
