"""What the two sides of the hand-off ask their role to do, in the order given. Plain data; the role executes it.

The sides decide and never touch a peer, a transfer thread, the scheduler or the pool themselves. Streams, fetches and keys
that are gone are ignored by whoever receives them. Not so requests: Export, Import, FirstToken and KVComplete are for one that
lives and has its pages. They are executed at once, and nothing gives them where that one may be over already (`release`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import EngineRequest, Output, Provenance
from jdisagg.handoff.messages import ChunkReady, DecodeToPrefill, HandoffId, Lending, Open, PrefillToDecode

# --- decode side


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the hand-off's stream on `peer` with `message`."""

    handoff: HandoffId
    peer: str
    message: Open


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to P on an open stream."""

    handoff: HandoffId
    message: DecodeToPrefill


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End the stream; nothing of it is expected any more."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class PeerReady:
    """P has memory for the request and computes it: pages may be reserved for it here; or `is_ready` no more."""

    request_id: str
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the piece of `ready` by `deadline_s` (monotonic); answer with on_arrived or on_failed, if it is not cancelled."""

    handoff: HandoffId
    peer: str
    ready: ChunkReady
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Forget every fetch of the stream."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class Import:
    """Scatter the piece that just arrived under `key` into the request's pages."""

    request_id: str
    handoff: HandoffId
    key: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """P sampled the next token of the request. At most once per request; with `output.finish` set the request is over."""

    request_id: str
    output: Output


@dataclass(frozen=True, slots=True)
class KVComplete:
    """KV of every token known at `start` is in place and FirstToken was given: the sampled token is fed next."""

    request_id: str
    provenance: Provenance
    brought_by: str  # the peer that sent the last of it; "" where none had to come


@dataclass(frozen=True, slots=True)
class ComputeLocally:
    """Prefill here, when its turn comes. KV of [0, held_tokens) has arrived: with prefix caching it is left to be found again,
    else it is computed too. A FirstToken that was given stays."""

    request_id: str
    held_tokens: int
    provenance: Provenance  # of what has arrived, and the rungs taken so far, this one included


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is over with `error`."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Recovered:
    """A rung of the recovery ladder was taken: for the metric and the log."""

    rung: str  # "refetch" | "other_backend" | "reconnect" | "other_prefill" | "local_prefill"
    request_id: str
    peer: str  # the peer that failed; "" when there was none
    stage: str
    cause: str
    unreached: str = ""  # the backend given up, where nothing could be reached over it
    refused: bool = False  # by a peer that can never serve the request


@dataclass(frozen=True, slots=True)
class NoKV:
    """The peer may be well, and what it published does not come: why its stream was given up."""

    peer: str
    cause: str


@dataclass(frozen=True, slots=True)
class Hedged:
    """A hedge is over: what became of asking `other` while `peer` was quiet. For the metric and the log."""

    outcome: str  # "moved" to `other` | "returned": `peer` was heard again | "refused": `other` could not help
    # | "abandoned": the request ended
    request_id: str
    peer: str
    other: str


DecodeAction = (
    OpenStream
    | Send
    | CloseStream
    | PeerReady
    | Fetch
    | CancelFetch
    | Import
    | FirstToken
    | KVComplete
    | ComputeLocally
    | Fail
    | Recovered
    | NoKV
    | Hedged
)

# --- prefill side


@dataclass(frozen=True, slots=True)
class Admit:
    """Queue `request` (its id is unique per stream); answer with on_admitted or on_refused.

    D holds KV of its first `held_tokens` tokens, which can be fetched from there when `lending` says so. `goes_on`: its client
    has some of the answer, so that no full queue refuses it.
    """

    handoff: HandoffId
    request: EngineRequest
    held_tokens: int = 0
    lending: Lending | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` to D."""

    handoff: HandoffId
    message: PrefillToDecode


@dataclass(frozen=True, slots=True)
class CloseReply:
    """End the stream from P's side, after everything sent."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class Export:
    """Gather KV of tokens [begin, end) into an array of its own and publish it under `key`."""

    handoff: HandoffId
    engine_request_id: str
    begin: int
    end: int
    key: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Free the published piece."""

    key: str


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """The hand-off is over: stop computing the request, its pages go to the prefix cache. Idempotent."""

    engine_request_id: str


@dataclass(frozen=True, slots=True)
class Unpark:
    """The parked request waits again, at its old place, to be computed once more."""

    engine_request_id: str


PrefillAction = Admit | Unpark | Reply | CloseReply | Export | Discard | ReleaseRequest
