"""GenerationService over an Edge: the public gRPC API.

Errors end the call with the status of their type; google.rpc details (`grpc-status-details-bin`) carry the field at fault
(BadRequest) or the time to wait (RetryInfo).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import grpc.aio

from jdisagg.api.channels import MAX_REQUEST_BYTES
from jdisagg.api.codec import encode_fields, encode_finish, given_sampling, refuse
from jdisagg.api.generation.choice import ChoiceResult, Delta, ScoredToken, Transcript, has_many_scores
from jdisagg.api.generation.context_length import Prompt
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import DEFAULT_MAX_TOKENS, Conversion, TextRequest, check_model, most_tokens
from jdisagg.api.generation.sampling_bounds import check_logit_bias
from jdisagg.api.unread import Reader, not_taken
from jdisagg.core.errors import DeadlineExceeded, InvalidRequest, JdisaggError, RequestError
from jdisagg.core.requests import SamplingParams
from jdisagg.core.trace import TRACEPARENT, read_traceparent
from jdisagg.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_SAMPLING_FIELDS = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Add to a grpc.aio server that runs in the Edge's event loop."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Write deltas, then exactly one `complete`; a cancelled call frees everything at once, and so does one whose client
        takes nothing any more, DEADLINE_EXCEEDED."""
        try:
            unread = await self._send(request, context)
        except RequestError as error:
            self._edge.ends.failed(error)
            refuse(context, error, _path(error.field, request))
        except Exception as error:  # noqa: BLE001 - a bug of ours: gRPC would end the call with UNKNOWN, and tell the client all
            self._edge.ends.failed(error)
            self._edge.ends.tell("request %s: a call of Generate failed", request.request_id or "without an id", error)
            refuse(context, JdisaggError("internal error; the server's log has the details"))
        else:
            if unread is not None:
                refuse(context, unread)  # waits for a reader that stands still, and holds no answer meanwhile

    async def _send(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> DeadlineExceeded | None:
        """The whole answer, or as much as is taken; then what is to be said of that. Raises RequestError."""
        timeout_s, traceparent = context.time_remaining(), _traceparent(context)
        job = await self._edge.admit(read_generate(request, self._edge.defaults, timeout_s, traceparent=traceparent))
        transcript = self._edge.transcript(job, keep="text")  # its reader has them already
        has_begun = False
        with Reader(context) as reader:
            async with aclosing(self._edge.stream(job)) as deltas:
                async for delta in deltas:
                    if not has_begun:
                        has_begun = True
                        await context.send_initial_metadata(())  # it would wait with the message, and so would a status
                    transcript.add(delta)
                    if has_many_scores([delta]):
                        message = await self._edge.beside(partial(encode_delta, delta))
                    else:
                        message = encode_delta(delta)
                    if not await reader.takes(generation_pb2.GenerateResponse(request_id=job.request_id, delta=message)):
                        return _unread(job.request_id)
            complete = encode_complete(transcript)
            is_read = await reader.takes(generation_pb2.GenerateResponse(request_id=job.request_id, complete=complete))
        return None if is_read else _unread(job.request_id)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        """End a Generate, be it that its prompt is still read: its unfinished choices get FINISH_REASON_ABORT. Unknown ids are
        ignored."""
        self._edge.abort(request.request_id)
        return generation_pb2.AbortResponse()

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelResponse | None:
        """The served model; NOT_FOUND for another name, UNAVAILABLE at a router that no decode worker has registered with."""
        try:
            card = self._edge.card
            check_model(request.model, card)
        except JdisaggError as error:
            return refuse(context, error)
        has_chat_template = self._edge.tokenizer.chat is not None
        return encode_fields(card, generation_pb2.GetModelResponse, model=card.name, has_chat_template=has_chat_template)


def read_generate(
    request: generation_pb2.GenerateRequest, defaults: SamplingParams, timeout_s: float | None, *, traceparent: str = ""
) -> TextRequest:
    """The message as a TextRequest. Raises InvalidRequest when it has no prompt, or more than MAX_REQUEST_BYTES."""
    if (num_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
        raise InvalidRequest(f"the request has {num_bytes} bytes, more than {MAX_REQUEST_BYTES}; shorten its prompt")
    sampling = request.sampling
    return TextRequest(
        request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
        prompts=(_prompt(request),),
        model=request.model,
        sampling=_sampling(sampling, defaults),
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        n=request.n or 1,
        stop=tuple(request.stop),
        echo=request.echo,
        conversion=Conversion(
            most_prompt_tokens=most_tokens(request.truncate_prompt_tokens or None),
            shows_stop=request.include_stop_str_in_output,
        ),
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
        traceparent=traceparent,
    )


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    values = [value for key, value in context.invocation_metadata() or () if key == TRACEPARENT]
    return read_traceparent(values[0]) if len(values) == 1 and isinstance(values[0], str) else ""


def encode_delta(delta: Delta) -> generation_pb2.Delta:
    """One delta as a message."""
    return generation_pb2.Delta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_logprobs(delta.logprobs) if delta.logprobs else None,
        prompt_logprobs=_logprobs(delta.prompt_logprobs) if delta.prompt_logprobs else None,
        finish=encode_finish(delta.finish),
    )


def encode_complete(transcript: Transcript) -> generation_pb2.Complete:
    """The whole result as a message."""
    return generation_pb2.Complete(
        choices=[_choice(choice) for choice in transcript.choices],
        usage=encode_fields(transcript.usage, generation_pb2.Usage),
    )


def _choice(choice: ChoiceResult) -> generation_pb2.Choice:
    return generation_pb2.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        finish=encode_finish(choice.finish),
        stop=choice.stop if isinstance(choice.stop, str) else "",
        provenance=None if choice.provenance is None else encode_fields(choice.provenance, common_pb2.Provenance),
    )


def _logprobs(tokens: Sequence[ScoredToken]) -> list[common_pb2.TokenLogprob]:
    return [
        common_pb2.TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob or 0.0,
            top=[common_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
            absent=token.logprob is None,
        )
        for token in tokens
    ]


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest.of("prompt", "give text or token_ids")
    return request.text if kind == "text" else tuple(request.token_ids.ids)


def _sampling(message: common_pb2.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    check_logit_bias(len(message.logit_bias))
    given = given_sampling(message)
    if given.get("top_k") in (0, -1):
        given["top_k"] = None
    of_request = {"seed": defaults.seed, "max_tokens": defaults.max_tokens}  # what is given of these is read for itself
    return replace(defaults, **given | of_request)


def _unread(request_id: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"request {request_id}: {not_taken('its answer')}")


def _path(field: str | None, request: generation_pb2.GenerateRequest) -> str | None:
    """The field's path in GenerateRequest."""
    if field == "prompt":
        return request.WhichOneof("prompt") or "prompt"
    return f"sampling.{field}" if field in _SAMPLING_FIELDS else field
