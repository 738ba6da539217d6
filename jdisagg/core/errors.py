"""The one error tree. Each type maps to one gRPC status and one HTTP status; messages say what to change.

`core` imports no grpc, so the status is kept by name ("INVALID_ARGUMENT"); `api` turns it into the enum.
"""

from __future__ import annotations

from typing import ClassVar, Self


class JdisaggError(Exception):
    """Base of every error that may reach a user."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"  # OpenAI error object's `type`
    reason: ClassVar[str] = "error"  # label of jdisagg_requests_finished_total
    field: str | None = None  # of the request, at fault; None = none is

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(JdisaggError):
    """A flag, TOML key or checkpoint that cannot be served; the process exits 2 with the message."""

    grpc_status = "FAILED_PRECONDITION"
    exit_status: ClassVar[int] = 2


class NoMemory(ConfigError):
    """A device has no memory left for a start. Another process may have it that is about to end, or to give some back: a
    supervisor tries again."""

    exit_status = 1


class NotFetched(ConfigError):
    """A model that cannot be fetched now: the network fails, or whoever has it is down. A supervisor tries again."""

    exit_status = 1


class SelfTestFailed(ConfigError):
    """An engine did not bring its own first request to an end. A supervisor starts a fresh one."""

    exit_status = 1


class RequestError(JdisaggError):
    """Base of errors that end one request and no other. Each kind can be made of a message alone, as replays do."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def reasons(cls) -> frozenset[str]:
        """Every label under which such an error is counted."""
        return frozenset({cls.reason}).union(*(kind.reasons() for kind in cls.__subclasses__()))


class InvalidRequest(RequestError):
    """The caller's fault: out of range, too long, contradictory."""

    grpc_status, http_status, kind = "INVALID_ARGUMENT", 400, "invalid_request_error"
    reason = "invalid"

    @classmethod
    def of(cls, field: str, told: str) -> Self:
        """That of one field, which its message begins with."""
        return cls(f"{field}: {told}", field=field)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context, or what a worker can hold of it."""


class ModelNotFound(RequestError):
    """The named model is not served here."""

    grpc_status, http_status, kind = "NOT_FOUND", 404, "invalid_request_error"
    reason = "invalid"


class NeverConnected(ConnectionError):
    """Nobody accepted a connection: refused, no way there, no answer in the time that one takes, or ended without a word."""


class Stalled(TimeoutError):
    """Nothing comes any more on a connection that stands; its time is not over."""


class Unauthenticated(RequestError):
    """API key missing or wrong."""

    grpc_status, http_status, kind = "UNAUTHENTICATED", 401, "authentication_error"
    reason = "unauthenticated"


class Overloaded(RequestError):
    """Queues are full; `retry_after_s` says when to come back."""

    grpc_status, http_status, kind = "RESOURCE_EXHAUSTED", 429, "overloaded_error"
    reason = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """Draining, or no usable peer."""

    grpc_status, http_status, kind = "UNAVAILABLE", 503, "service_unavailable"
    reason = "unavailable"


class AddressTaken(Unavailable):
    """Another process lives at the address; a worker that registers is told by a status of its own."""

    grpc_status, http_status = "ALREADY_EXISTS", 409


class Unfit(Unavailable):
    """A worker that registers is of another model than those of this router, or is reached by nobody else."""

    grpc_status, http_status = "FAILED_PRECONDITION", 409


class OtherProcess(Unavailable):
    """What came is for a process that had this address before."""

    grpc_status, http_status = "FAILED_PRECONDITION", 409


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""

    grpc_status, http_status, kind = "DEADLINE_EXCEEDED", 504, "timeout_error"
    reason = "deadline"


class Cancelled(RequestError):
    """The client cancelled."""

    grpc_status, http_status, kind = "CANCELLED", 499, "cancelled"
    reason = "abort"


class HandoffLost(RequestError):
    """Every rung of the recovery ladder failed."""

    grpc_status, http_status, kind = "ABORTED", 502, "handoff_error"
    reason = "handoff_lost"


class Deadly(HandoffLost):
    """All prefill workers there are, or as many as one asks, went down with it: it may be what they died of."""

    def __init__(self, message: str, *, num_down: int = 1) -> None:
        super().__init__(message)
        self.num_down = num_down


class Quarantined(HandoffLost):
    """In flight when several workers died: not tried again, and refused for a while."""


class NumericalError(RequestError):
    """NaN or infinite logits; the message names step and layer."""

    grpc_status, http_status, kind = "INTERNAL", 500, "server_error"
    reason = "numerical"
