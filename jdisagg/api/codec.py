"""Between protos and the core's dataclasses: requests, outputs, errors. Hand-offs: `peer/codec.py`, members: `fleet/codec.py`.

Deadlines travel as remaining milliseconds and become absolute again on the receiver's monotonic clock, so clocks never have
to agree. Floats travel as 32 bits. Unknown numbers have a stated meaning: a FinishReason is ERROR, a code is INTERNAL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.api.status_details import details_metadata, end_call, read_retry_after_s, shown
from jdisagg.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    Deadly,
    HandoffLost,
    InvalidRequest,
    JdisaggError,
    ModelNotFound,
    NumericalError,
    Overloaded,
    RequestError,
    Unauthenticated,
    Unavailable,
)
from jdisagg.core.fleet import MAX_PREFILL_PEERS
from jdisagg.core.requests import (
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    Output,
    Provenance,
    SamplingParams,
    TokenLogprob,
)
from jdisagg.core.speed import Speed
from jdisagg.core.told import MOST_CHARACTERS, told
from jdisagg.core.trace import read_traceparent
from jdisagg.v1 import common_pb2

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_MAX_DEADLINE_S = 30 * 86_400.0  # an infinite deadline is sent as a month

_FINISH_TO_PROTO = {reason: getattr(common_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}

GRAMMAR_KINDS = {kind: getattr(common_pb2, f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KIND_FROM_PROTO = {number: kind for kind, number in GRAMMAR_KINDS.items()}

_IS_OPTIONAL = {name: field.has_presence for name, field in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()}

_NAME_BY_CODE = {status.value[0]: status.name for status in grpc.StatusCode}
_ERROR_BY_NAME: dict[str, type[RequestError]] = {
    error.grpc_status: error
    for error in (InvalidRequest, ModelNotFound, Unauthenticated, Unavailable, DeadlineExceeded, Cancelled, HandoffLost)
}


# --- fields


@cache
def _named_alike(data: Any, message: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(data) if field.name in message.DESCRIPTOR.fields_by_name)


def encode_fields(data: Any, message: type[M], **others: Any) -> M:
    """A message with those fields of a dataclass that both name alike, and `others`: what is not there, or has another form."""
    return message(**{name: getattr(data, name) for name in _named_alike(type(data), message)} | others)


def decode_fields(message: Message, data: type[T], *, text: Callable[[str], str] = str, **others: Any) -> T:
    """A dataclass with those fields that its message names alike, repeated ones as tuples and each string as `text` has it, and
    `others`: what is not there, or has another form."""
    for name in _named_alike(data, type(message)):
        if name not in others:
            field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
            assert (field.message_type, field.has_presence) == (None, False), f"{name} has another form"
            if field.type == field.TYPE_STRING:
                others[name] = tuple(map(text, value)) if field.is_repeated else text(value)
            else:
                others[name] = tuple(value) if field.is_repeated else value
    return data(**others)


# --- errors


def status_of(error: JdisaggError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


def refuse(context: grpc.aio.ServicerContext, error: JdisaggError, path: str | None = None) -> None:
    """Have an RPC end with the error's status, message and details once its handler returns. `path`: its field's in the
    request, where that is no name."""
    code = status_of(error)
    end_call(context, code, shown(error.message), details_metadata(code, error, path or error.field))


def encode_error(error: RequestError) -> common_pb2.RequestFailure:
    """An error as data."""
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return common_pb2.RequestFailure(
        code=status_of(error).value[0],
        message=error.message,
        field=error.field or "",
        retry_after_ms=round(retry_after_s * 1000),
        numerical=isinstance(error, NumericalError),
        deadly=isinstance(error, Deadly),
        num_down=error.num_down if isinstance(error, Deadly) else 0,
        too_long=isinstance(error, ContextLengthExceeded),
    )


def decode_error(message: common_pb2.RequestFailure) -> RequestError:
    """The error class of that code; an unknown code becomes a plain RequestError (INTERNAL)."""
    name, text = _NAME_BY_CODE.get(message.code, "INTERNAL"), told(message.message)
    if name == Overloaded.grpc_status:
        return Overloaded(text, retry_after_s=message.retry_after_ms / 1000)
    if message.numerical and name == NumericalError.grpc_status:
        return NumericalError(text)
    if message.deadly and name == Deadly.grpc_status:
        return Deadly(text, num_down=message.num_down or MAX_PREFILL_PEERS)
    if message.too_long and name == ContextLengthExceeded.grpc_status:
        return ContextLengthExceeded(text, field=told(message.field) or None)
    return _ERROR_BY_NAME.get(name, RequestError)(text, field=told(message.field) or None)


def error_from_rpc(error: grpc.aio.AioRpcError, what: str) -> RequestError:
    """The failure of an RPC as the core's error; `what` says who was asked for what."""
    name = error.code().name
    message = f"{what}: {name}: {told(error.details() or '')}"
    if name == Overloaded.grpc_status:
        retry_after_s = read_retry_after_s(error)
        return Overloaded(message) if retry_after_s is None else Overloaded(message, retry_after_s=retry_after_s)
    return _ERROR_BY_NAME.get(name, Unavailable)(message)


# --- workers


def encode_speed(speed: Speed | None) -> common_pb2.Speed | None:
    """None is not sent."""
    return None if speed is None else encode_fields(speed, common_pb2.Speed)


def decode_speed(message: common_pb2.Speed) -> Speed | None:
    """None where it is absent, and where it is none: others divide by it."""
    speed = decode_fields(message, Speed)
    return speed if 0.0 <= speed.least <= speed.most and 0.0 < speed.most < math.inf else None


# --- requests


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Milliseconds left, rounded up; 0 = passed."""
    return math.ceil(min(max(deadline_s - now_s, 0.0), _MAX_DEADLINE_S) * 1000)


def encode_sampling(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Complete parameters: every field set."""
    grammar = sampling.grammar and common_pb2.Grammar(kind=GRAMMAR_KINDS[sampling.grammar.kind], text=sampling.grammar.text)
    return encode_fields(sampling, common_pb2.SamplingParams, logit_bias=dict(sampling.logit_bias), grammar=grammar)


def _decode_grammar(message: common_pb2.Grammar) -> Grammar:
    if (kind := _KIND_FROM_PROTO.get(message.kind)) is None:
        wanted = ", ".join(common_pb2.GrammarKind.Name(number) for number in _KIND_FROM_PROTO)
        raise InvalidRequest(f"grammar.kind: wanted one of {wanted}, got {message.kind}", field="grammar")
    return Grammar(kind, message.text)


def given_sampling(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """Fields of SamplingParams by name, optional ones that are absent left out; `logit_bias` comes out sorted by token id.
    Raises InvalidRequest for a grammar of an unknown kind."""
    names = [name for name, is_optional in _IS_OPTIONAL.items() if not is_optional or message.HasField(name)]
    given: dict[str, Any] = {name: getattr(message, name) for name in names}
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    given["stop_token_ids"] = tuple(message.stop_token_ids)
    if "grammar" in given:
        given["grammar"] = _decode_grammar(message.grammar)
    return given


def encode_request(request: EngineRequest, now_s: float) -> common_pb2.EngineRequest:
    """`now_s` is this process's monotonic clock."""
    sampling, deadline_ms = encode_sampling(request.sampling), remaining_ms(request.deadline_s, now_s)
    return encode_fields(request, common_pb2.EngineRequest, sampling=sampling, deadline_ms=deadline_ms)


def decode_request(message: common_pb2.EngineRequest, now_s: float) -> EngineRequest:
    """Raises InvalidRequest when it lacks an id or a prompt, or has an id that would fill our logs."""
    if not 0 < len(message.request_id) <= MOST_CHARACTERS:
        got = f"{len(message.request_id)} characters" if message.request_id else "none"
        raise InvalidRequest(
            f"request_id: got {got}; every engine request has one, of {MOST_CHARACTERS} at most", field="request_id"
        )
    if not message.prompt_token_ids:
        raise InvalidRequest(f"request {message.request_id}: prompt_token_ids is empty; send at least one", field="prompt")
    return decode_fields(
        message,
        EngineRequest,
        sampling=SamplingParams(**given_sampling(message.sampling)),
        deadline_s=now_s + min(message.deadline_ms / 1000, _MAX_DEADLINE_S),
        traceparent=read_traceparent(message.traceparent),
        num_asked=max(1, message.num_asked),
    )


# --- outputs


def encode_logprob(logprob: TokenLogprob | None) -> common_pb2.TokenLogprob:
    """None (the first prompt token) is marked `absent`."""
    if logprob is None:
        return common_pb2.TokenLogprob(absent=True)
    return common_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top=[common_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top],
    )


def _decode_logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, tuple([(top.token_id, top.logprob) for top in message.top]))


def _decode_provenance(message: common_pb2.Provenance) -> Provenance:
    """No count is below 0, whatever it says: others reckon with them."""
    counts = {field.name: max(0, value) for field, value in message.ListFields() if isinstance(value, int)}
    return decode_fields(message, Provenance, text=told, **counts)


def encode_finish(finish: FinishReason | None) -> common_pb2.FinishReason:
    """None = not ended."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if finish is None else _FINISH_TO_PROTO[finish]


def encode_output(output: Output) -> common_pb2.Output:
    """One request's share of a tick."""
    return common_pb2.Output(
        request_id=output.request_id,
        attempt=output.attempt,
        token_ids=output.token_ids,
        logprobs=None if output.logprobs is None else map(encode_logprob, output.logprobs),
        prompt_logprobs=None if output.prompt_logprobs is None else map(encode_logprob, output.prompt_logprobs),
        finish=encode_finish(output.finish),
        stop_token_id=output.stop_token_id,
        error=None if output.error is None else encode_error(output.error),
        cached_tokens=output.cached_tokens,
        provenance=None if output.provenance is None else encode_fields(output.provenance, common_pb2.Provenance),
    )


def decode_output(message: common_pb2.Output) -> Output:
    """Empty repeated logprobs come out as None."""
    finish = None if not message.finish else _FINISH_FROM_PROTO.get(message.finish, FinishReason.ERROR)
    scored, prompt = message.logprobs, message.prompt_logprobs
    return Output(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(_decode_logprob, scored)) if scored else None,
        prompt_logprobs=tuple(None if item.absent else _decode_logprob(item) for item in prompt) if prompt else None,
        finish=finish,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error=decode_error(message.error) if message.HasField("error") else None,
        cached_tokens=message.cached_tokens,
        provenance=_decode_provenance(message.provenance) if message.HasField("provenance") else None,
    )
