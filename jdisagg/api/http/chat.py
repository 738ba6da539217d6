"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jdisagg.api.generation.choice import Delta, ScoredToken, Transcript
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Job, TextRequest
from jdisagg.api.http.answer_json import LONG_IDS, PlainChunks, long_event, whole_response
from jdisagg.api.http.body import Body, read_body
from jdisagg.api.http.call_grammars import with_forced, with_free_calls
from jdisagg.api.http.calls import read_offer, reader_of
from jdisagg.api.http.connection import Event, open_stream, while_connected
from jdisagg.api.http.messages import THOUGHT_FIELDS, render_prompt
from jdisagg.api.http.parameters import LENGTH, ResponseOptions, admit, read_options, read_request, read_sampling, read_timeout
from jdisagg.api.http.request_id import request_id_of
from jdisagg.api.http.shapes import chat_logprobs, envelope, prompt_logprobs
from jdisagg.api.http.thoughts import Readers, ThoughtsReader, as_shown, read_thinking, with_thoughts
from jdisagg.api.http.unserved import CHAT_FIELDS, refuse_unserved
from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import MAX_LOGPROBS

QUIET_S = 10.0  # of a stream whose tokens have no text to show, as a thought that is hidden: proxies end one in a minute
_MESSAGE = {"role": "assistant", "content": None, "refusal": None}  # beside what its reader has


async def answer_chat(edge: Edge, request: Request) -> Response:
    """Answer one request, streamed or whole."""
    body, arrived_s = await read_body(request), time.monotonic()
    options = read_options(request, body)
    num_top = _read_top_logprobs(body)
    num_prompt_top = _read_prompt_logprobs(body, stream=options.stream)
    request_id = request_id_of(request, body)
    read = partial(read_chat, body, edge, num_top, request_id, arrived_s)
    if body.is_long:
        reading = edge.read_long(read, body.num_bytes, request_id, arrived_s=arrived_s, timeout_s=read_timeout(body))
        text_request, readers = await while_connected(request.receive, reading)
    else:
        text_request, readers = read()
    job = await admit(edge, request, body, text_request)
    answer = _Answer(edge, job, options, num_top=num_top, num_prompt_top=num_prompt_top, readers=readers)
    del body, read, text_request  # of megabytes perhaps, and the answer may take minutes
    if options.stream:
        return await open_stream(request, answer.events(), edge.ends)
    whole = whole_response(edge, job, answer.whole, shows_ids=options.return_token_ids)
    return await while_connected(request.receive, whole)


def read_chat(body: Body, edge: Edge, num_top: int | None, request_id: str, arrived_s: float) -> tuple[TextRequest, Readers]:
    """The body as a TextRequest, and the readers of its answers; a long one takes a while. Raises InvalidRequest naming the
    field."""
    refuse_unserved(body, CHAT_FIELDS)
    offer, prompt = read_offer(body, edge), render_prompt(body, edge.tokenizer.chat)
    body.names["prompt"] = "messages"
    sampling = with_forced(read_sampling(body, edge.defaults, logprobs=num_top), body)
    sampling = with_free_calls(sampling, body, edge)
    thinking = read_thinking(body, edge, prompt, sampling.grammar)
    request = read_request(body, request_id, (prompt,), sampling, add_special_tokens=False)  # the template writes BOS and EOS
    if request.max_tokens is not None and request.max_tokens < 1:  # intake would advise to echo the prompt, which a chat cannot
        name = body.names.get(LENGTH, LENGTH)
        raise InvalidRequest.of(name, f"must be at least 1; got {request.max_tokens}")
    body.refuse_misspelt()
    shown = () if offer is None else tuple(offer.hidden)
    conversion = as_shown(replace(request.conversion, shown=shown), thinking, body)
    return replace(request, conversion=conversion, arrived_s=arrived_s), with_thoughts(reader_of(body, offer), thinking)


def _read_top_logprobs(body: Body) -> int | None:
    """Alternatives per token; None = no logprobs at all."""
    wanted, num_top = body.boolean("logprobs"), body.integer("top_logprobs")
    if num_top and not wanted:
        raise InvalidRequest.of("top_logprobs", "needs logprobs=true")
    if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest.of("top_logprobs", f"must be in [0, {MAX_LOGPROBS}]; got {num_top}")
    return (num_top or 0) if wanted else None


def _read_prompt_logprobs(body: Body, *, stream: bool) -> int | None:
    """Alternatives per token of the prompt; None = it is not scored."""
    num_top = body.integer("prompt_logprobs")
    if stream and num_top is not None:  # a chunk has no place for them, as in vLLM
        told = "are part of an answer that does not stream; leave out one of the two, or use /v1/completions"
        raise InvalidRequest.of("prompt_logprobs", told)
    return num_top


def _is_quiet(told_s: float) -> bool:
    return time.monotonic() - told_s > QUIET_S


class _Answer:
    """Writes one job's answer."""

    def __init__(
        self,
        edge: Edge,
        job: Job,
        options: ResponseOptions,
        *,
        num_top: int | None,
        num_prompt_top: int | None,
        readers: Readers,
    ) -> None:
        self._edge = edge
        self._job = job
        self._options = options
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._readers = [readers.make() for _ in job.requests]  # one per choice
        self._nothing = self._readers[0].nothing
        self._no_thought = readers.nothing_thought()
        self._is_text = self._readers[0].is_text
        card = edge.card  # a router looks through its fleet for it
        self._envelope = partial(envelope, request_id=job.request_id, created=int(time.time()), card=card)

    def whole(self, transcript: Transcript) -> dict[str, Any]:
        """The response of a request that does not stream."""
        transcript.num_thought = 0 if self._no_thought else None
        choices = []
        for choice in transcript.choices:
            shown: dict[str, Any] = {
                "index": choice.index,
                "message": _MESSAGE | self._no_thought | self._readers[choice.index].message(choice.text),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": self._readers[choice.index].finish_reason(choice.finish) if choice.finish else None,
                "stop_reason": choice.stop,
            }
            if self._options.return_token_ids:
                shown["token_ids"] = list(choice.token_ids)
            choices.append(shown)
            self._count(choice.index)
            self._count_thought(transcript, choice.index, choice.token_ids)
        answer = self._envelope("chat.completion", choices, transcript.fingerprint)
        if self._options.return_token_ids:
            answer["prompt_token_ids"] = self._job.requests[0].prompt_token_ids
        if self._num_prompt_top is not None:
            scored = transcript.choices[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(self._edge.tokenizer, scored, self._num_prompt_top)
        return self._options.with_totals(answer, transcript)

    def _count(self, index: int) -> None:
        """What became of the tools that were offered, once a choice has ended."""
        if (outcome := self._readers[index].outcome) is not None:
            self._edge.ends.answered_tools(outcome)

    async def events(self) -> AsyncGenerator[Event]:
        """The chunks of a request that streams: the role first, then text, then a finish reason for each choice."""
        transcript = self._edge.transcript(self._job, keep="counts")
        transcript.num_thought = 0 if self._no_thought else None
        plain = None
        if self._num_top is None and self._is_text and not self._options.shows_more:
            plain = PlainChunks(
                lambda delta: self._options.with_usage(self._text_chunk(delta, {"content": delta.text}), transcript)
            )
        opened: set[int] = set()
        told_s = 0.0
        async with aclosing(self._edge.stream(self._job)) as deltas:
            async for delta in deltas:
                transcript.add(delta)
                if delta.index not in opened:
                    first = self._options.with_usage(self._first_chunk(delta, shows_prompt=not opened), transcript)
                    is_long = len(first.get("prompt_token_ids", ())) > LONG_IDS
                    yield await self._edge.beside(partial(long_event, first)) if is_long else first
                    opened.add(delta.index)
                    told_s = time.monotonic()
                shows_tokens = self._options.return_token_ids and delta.token_ids
                chunk = None
                if plain is not None and self._readers[delta.index].is_plain:
                    chunk = plain.chunk(delta, delta.fingerprint)
                if chunk is not None:
                    told_s = time.monotonic()
                    yield chunk
                elif (news := self._news(delta, transcript)) or delta.logprobs or shows_tokens or _is_quiet(told_s):
                    told_s = time.monotonic()
                    yield self._options.with_usage(self._text_chunk(delta, news), transcript)
                if delta.finish is not None:
                    self._count(delta.index)
                    yield self._options.with_usage(self._last_chunk(delta, transcript), transcript)
        if self._options.include_usage:
            end = self._envelope("chat.completion.chunk", [], transcript.fingerprint)
            yield self._options.with_totals(end, transcript)

    def _first_chunk(self, delta: Delta, *, shows_prompt: bool) -> dict[str, Any]:
        event = self._chunk(delta, {"role": "assistant", "content": self._nothing})
        if shows_prompt and self._options.return_token_ids:
            event["prompt_token_ids"] = self._job.requests[0].prompt_token_ids
        return event

    def _news(self, delta: Delta, transcript: Transcript) -> dict[str, Any]:
        """What its text adds to the message; empty: nothing."""
        news = self._readers[delta.index].news(delta.text, is_last=delta.finish is not None)
        self._count_thought(transcript, delta.index, delta.token_ids)
        return news

    def _count_thought(self, transcript: Transcript, index: int, token_ids: Sequence[int]) -> None:
        reader = self._readers[index]
        if isinstance(reader, ThoughtsReader):
            transcript.num_thought = (transcript.num_thought or 0) + reader.count(token_ids)

    def _text_chunk(self, delta: Delta, news: dict[str, Any]) -> dict[str, Any]:
        event = self._chunk(
            delta, news or {"content": self._readers[delta.index].nothing}, logprobs=self._logprobs(delta.logprobs)
        )
        if self._options.return_token_ids:
            event["choices"][0]["token_ids"] = list(delta.token_ids)
        return event

    def _last_chunk(self, delta: Delta, transcript: Transcript) -> dict[str, Any]:
        assert delta.finish is not None
        nothing = {"content": ""} if self._is_text else {}  # guidellm reads the content of each chunk of a text
        event = self._chunk(delta, nothing, finish=self._readers[delta.index].finish_reason(delta.finish))
        event["choices"][0]["stop_reason"] = delta.stop
        return self._options.with_origin(event, transcript)

    def _chunk(
        self, delta: Delta, shown: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        if self._no_thought:
            shown = {THOUGHT_FIELDS[0]: None} | shown
        choice = {"index": delta.index, "delta": shown, "logprobs": logprobs, "finish_reason": finish}
        return self._envelope("chat.completion.chunk", [choice], delta.fingerprint)

    def _logprobs(self, tokens: list[ScoredToken] | tuple[ScoredToken, ...]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._edge.tokenizer, tokens, self._num_top, as_ids=self._options.tokens_as_ids)
