"""The P/D hand-off as plain messages: what D and P tell each other, whatever carries it.

D opens one stream per hand-off. Ranges are half-open token ranges [begin, end). The stream's life is the hand-off's life:

    D                                   P
    Open(request, held)          ->     admit, or Refused
                                 <-     Accepted(cached)
                                 <-     Started (P has pages now; not before that does D take any)
    Grant(credit)                ->     (D has pages now)
                                 <-     ChunkReady(key, range) ...       while P computes on
    fetch bytes of key, scatter
    Ack(key)                     ->     delete the array of `key`
                                 <-     Done(first token, num_chunks)
                                 <-     Parked (its pages went to others; sent when Done was, and no Grant came)
    close                        ->     release(handoff): pages go to P's prefix cache

The mirror image, between Accepted and Started, when D holds KV that P lacks (the answer of a chat's first turn) and lends it
(Open.lending):

                                 <-     Want([begin, end)), Grant(credit)     P has pages for the prompt now
    gather out of pinned pages
    ChunkReady(key, range) ...   ->     fetch bytes of key from D, scatter
                                 <-     Ack(key), Grant(more)
    delete the array of `key`
    Declined(reason)             ->     (D cannot, or no more)

Whatever way that ends, all there, declined, a lost piece, one second without progress, P computes what is missing and the
hand-off goes on. Without `lending`, as an older D sends it, P never asks. A ChunkReady that P no longer wants is acknowledged
at once, so nothing stays published at D.

Whoever sees the stream end first calls its own `release(handoff)`; it is idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import EngineRequest, Output


@dataclass(frozen=True, slots=True)
class HandoffId:
    """One stream opened for one request. `serial` is new for every stream, so late messages of an older one are told apart."""

    request_id: str
    serial: int


# --- D -> P; Grant, Ack and ChunkReady go the other way, too, for KV that P wants


@dataclass(frozen=True, kw_only=True, slots=True)
class Lending:
    """D publishes KV it holds when P wants it: pieces are fetched from `address` over `backend`, in D's `dtype`."""

    address: str
    backend: str
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Compute `request`; its first `held_tokens` tokens' KV are at D already. D takes pieces of `max_piece_tokens`."""

    request: EngineRequest
    held_tokens: int
    backend: str  # what P shall publish over
    backends: tuple[str, ...] = ()  # all that both can use, best first; () = `backend` alone
    head_shards: int = 1  # parts in which D's mesh holds the kv heads of a piece
    max_piece_tokens: int | None = None  # None = of any length
    lending: Lending | None = None  # None: P must not want any of it
    goes_on: bool = False  # the client has some of the answer, its first token at least, which `request` may not say


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Bytes that may be published since Open, cumulative."""

    credit_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """The piece is in D's pool; P may delete it."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """Send tokens [begin, end) of one KV group: again, or (P -> D) because D has them; in pieces of `piece_tokens` at most.

    With `backend` this and what follows goes over that one.
    """

    begin: int
    end: int
    reason: str
    group: int = 0
    backend: str = ""
    piece_tokens: int = 0  # 0 = as the other side cuts them


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined:
    """Nothing (more) of what P wants will be published."""

    reason: str


# --- P -> D


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """P has queued the request; `cached_tokens` of its prompt are in P's prefix cache."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """P computes the request, so it holds every page it needs there.

    D reserves its own pages only now, so that none stand empty for prompts in P's queue.
    """


@dataclass(frozen=True, slots=True)
class Parked:
    """P gave the pages of a computed prompt to prompts that waited, since D had none for it; a Grant has it computed again.

    This is why two full pools never wait for each other: whoever D has pages for needs only P's pages of those that D has
    none for, and these give way. A prompt is computed at most twice.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReady:
    """KV of tokens [begin, end) can be fetched under `key`. shape = (layers, tokens, heads, features)."""

    key: str
    begin: int
    end: int
    shape: tuple[int, int, int, int]
    dtype: str
    num_bytes: int
    checksum: int  # of the bytes, as the backend computes it; 0 = none
    group: int = 0
    backend: str = ""  # what it can be fetched over; "" = what Open said
    locator: str = ""  # what that backend needs beside the key


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The prompt is computed; `first` carries the first sampled token (with finish set if it was also the last)."""

    first: Output
    num_chunks: int  # ChunkReady messages on this stream in all


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """P will not do it (RESOURCE_EXHAUSTED, INVALID_ARGUMENT, ...)."""

    error: RequestError


# --- either side, made locally


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """At D, before anything P says on the stream: the transfer backends that both can use, best first. At least one."""

    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quiet:
    """At D: nothing, not even a heartbeat, came from P for `seconds`; too short to call it dead."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Awake:
    """At D, after Quiet: P is heard again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEnded:
    """The stream is gone: closed by the other side, timed out, or its process died. `reason` is for logs and metrics."""

    reason: str  # "closed" | "dead" | "heartbeat" | "unread" | "unreadable" | "hello" | "deadline" | "unreachable"
    error: RequestError | None = None
    is_death: bool = False  # P had taken the request and went down, as far as D can know by now; see Lives


@dataclass(frozen=True, slots=True)
class Lives:
    """At D, some time after StreamEnded with `is_death`: `peer` answers and is the same process. Only its connection broke."""

    peer: str


Down = Open | Grant | Ack | Want | ChunkReady | Declined  # what travels from D to P,
Up = Accepted | Started | Parked | ChunkReady | Done | Refused | Want | Grant | Ack  # and from P to D
DecodeToPrefill = Down | StreamEnded
MadeAtDecode = Agreed | Quiet | Awake | Lives  # what D's end of the stream says, not P
PrefillToDecode = Up | MadeAtDecode | StreamEnded
