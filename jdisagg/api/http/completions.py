"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jdisagg.api.generation.choice import ChoiceResult, Delta, Transcript, has_many_scores
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import DEFAULT_MAX_TOKENS, Job, TextRequest
from jdisagg.api.http.answer_json import LONG_IDS, PlainChunks, long_event, whole_response
from jdisagg.api.http.body import Body, read_body
from jdisagg.api.http.connection import Event, open_stream, while_connected
from jdisagg.api.http.parameters import (
    LENGTH,
    NEWER_LENGTH,
    ResponseOptions,
    admit,
    read_options,
    read_request,
    read_sampling,
)
from jdisagg.api.http.request_id import request_id_of
from jdisagg.api.http.shapes import completion_logprobs, envelope, prompt_logprobs
from jdisagg.api.http.unserved import COMPLETION_FIELDS, OF_CHATS_ALONE, refuse_unserved
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import SamplingParams


async def answer_completion(edge: Edge, request: Request) -> Response:
    """Answer one request, streamed or whole."""
    body = await read_body(request)
    options = read_options(request, body)
    text_request = read_completion(body, edge.defaults, request_id_of(request, body))
    job = await admit(edge, request, body, text_request)
    answer = _Answer(
        edge,
        job,
        options,
        num_top=text_request.sampling.logprobs,
        num_prompt_top=body.integer("prompt_logprobs"),
    )
    del body, text_request  # of megabytes perhaps, and the answer may take minutes
    if options.stream:
        return await open_stream(request, answer.events(), edge.ends)
    whole = whole_response(edge, job, answer.whole, shows_ids=options.return_token_ids)
    return await while_connected(request.receive, whole)


def read_completion(body: Body, defaults: SamplingParams, request_id: str) -> TextRequest:
    """The body as a TextRequest. Raises InvalidRequest naming the field."""
    refuse_unserved(body, COMPLETION_FIELDS)
    if body.get("prompt") is None:
        refuse_unserved(body, OF_CHATS_ALONE)
    logprobs, echo = body.integer("logprobs"), body.boolean("echo")
    sampling = read_sampling(body, defaults, logprobs=logprobs)
    if echo and logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(logprobs, sampling.prompt_logprobs or 0))
    request = read_request(body, request_id, body.prompts("prompt"), sampling, add_special_tokens=True)
    best_of, length, newer = body.integer("best_of"), body.integer(LENGTH), body.integer(NEWER_LENGTH)
    if best_of is not None and best_of != request.n:
        raise InvalidRequest.of("best_of", f"must equal n = {request.n} or be left out; got {best_of}")
    if length is not None and newer is not None and newer != length:  # some clients send both
        raise InvalidRequest.of(NEWER_LENGTH, f"must equal {LENGTH} = {length} or be left out; got {newer}")
    body.refuse_misspelt()
    return replace(request, default_max_tokens=DEFAULT_MAX_TOKENS, echo=echo)


class _Answer:
    """Writes one job's answer."""

    def __init__(
        self, edge: Edge, job: Job, options: ResponseOptions, *, num_top: int | None, num_prompt_top: int | None
    ) -> None:
        """Alternatives in `logprobs`, those of an echoed prompt too, and in `prompt_logprobs`; None: not shown."""
        self._edge = edge
        self._job = job
        self._options = options
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        card = edge.card  # a router looks through its fleet for it
        self._envelope = partial(envelope, "text_completion", request_id=job.request_id, created=int(time.time()), card=card)
        self._begun: set[int] = set()  # choices of which a chunk was written

    def whole(self, transcript: Transcript) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = [self._choice(choice, shows_prompt=True) for choice in transcript.choices]
        return self._options.with_totals(self._envelope(choices, transcript.fingerprint), transcript)

    async def events(self) -> AsyncGenerator[Event]:
        """The chunks of a request that streams; the first one of each choice has its prompt's tokens, if they are wanted."""
        transcript = self._edge.transcript(self._job, keep="counts")
        plain = None
        if self._num_top is None and not self._options.shows_more:
            plain = PlainChunks(lambda delta: self._event(delta, transcript))
        async with aclosing(self._edge.stream(self._job)) as deltas:
            async for delta in deltas:
                transcript.add(delta)
                if plain is not None and (chunk := plain.chunk(delta, transcript.fingerprint)) is not None:
                    yield chunk
                elif self._is_long(delta):
                    yield await self._edge.beside(lambda delta=delta: long_event(self._event(delta, transcript)))
                elif self._is_shown(delta):
                    yield self._event(delta, transcript)
        if self._options.include_usage:
            yield self._options.with_totals(self._envelope([], transcript.fingerprint), transcript)

    def _is_shown(self, delta: Delta) -> bool:
        shows_tokens = self._options.return_token_ids and delta.token_ids
        return bool(delta.text or delta.logprobs or delta.prompt_logprobs or shows_tokens or delta.finish)

    def _is_long(self, delta: Delta) -> bool:
        shows_prompt = self._options.return_token_ids and delta.index not in self._begun and self._is_shown(delta)
        shows_many = shows_prompt and len(self._job.requests[delta.index].prompt_token_ids) > LONG_IDS
        return shows_many or has_many_scores([delta])

    def _event(self, delta: Delta, transcript: Transcript) -> dict[str, Any]:
        choice = self._choice(delta, shows_prompt=delta.index not in self._begun)
        event = self._envelope([choice], transcript.fingerprint)
        self._begun.add(delta.index)
        return self._options.with_usage(self._options.with_origin(event, transcript), transcript)

    def _choice(self, choice: ChoiceResult | Delta, *, shows_prompt: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish.value if choice.finish else None,
            "stop_reason": choice.stop,
        }
        echoed = choice.prompt_logprobs if self._job.echo_texts is not None else ()
        if self._num_top is not None:
            scored, as_ids = [*echoed, *choice.logprobs], self._options.tokens_as_ids
            shown["logprobs"] = completion_logprobs(self._edge.tokenizer, scored, self._num_top, as_ids=as_ids)
        if choice.prompt_logprobs and self._num_prompt_top is not None:
            shown["prompt_logprobs"] = prompt_logprobs(self._edge.tokenizer, choice.prompt_logprobs, self._num_prompt_top)
        if self._options.return_token_ids:
            shown["token_ids"] = list(choice.token_ids)
            shown["prompt_token_ids"] = self._job.requests[choice.index].prompt_token_ids if shows_prompt else None
        return shown
