"""google.rpc details of an error (`grpc-status-details-bin`): the field at fault (BadRequest), the time to wait (RetryInfo).

https://cloud.google.com/apis/design/errors#error_details
"""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from jdisagg.core.errors import JdisaggError, Overloaded

DETAILS_KEY = "grpc-status-details-bin"
MOST_BYTES = 1000  # of a message, which travels three times; of a status beyond 16 KiB gRPC makes another one


def shown(message: str) -> str:
    """As much of an error's message as a status may carry: it may repeat what the client sent."""
    data = message.encode()
    return message if len(data) <= MOST_BYTES else data[:MOST_BYTES].decode(errors="ignore") + "..."


def details_metadata(code: grpc.StatusCode, error: JdisaggError, field: str | None) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for an RPC that `error` ends; empty when there is nothing to add. `field`: path in the request."""
    detail = any_pb2.Any()
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    elif field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=shown(error.message))
        detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    else:
        return ()
    status = status_pb2.Status(code=code.value[0], message=shown(error.message), details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)


def end_call(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, bytes], ...] = ()
) -> None:
    """Have an RPC end so once its handler returns. gRPC's `abort` raises, and keeps what it raised with the call: a cycle of
    all frames up to there, with the call and its request, until all of Python's objects are searched for garbage, which is
    seldom. A router that refused 2,500 prompts of 2,000 tokens grew by 110 MB."""
    context.set_code(code)
    context.set_details(text)
    context.set_trailing_metadata(metadata)


def read_retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds of a failed RPC's RetryInfo, when it carries one."""
    raw = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    if not isinstance(raw, bytes):
        return None
    try:
        status = status_pb2.Status.FromString(raw)
        retry = error_details_pb2.RetryInfo()
        found = any(detail.Unpack(retry) for detail in status.details)
    except DecodeError:
        return None  # not ours; the status itself says enough
    return retry.retry_delay.ToMilliseconds() / 1000 if found else None
