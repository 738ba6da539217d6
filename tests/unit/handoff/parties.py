"""One request at D, and one stream of it to a prefill worker, as the world of the hand-off tests knows them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import EngineRequest
from jdisagg.handoff.messages import DecodeToPrefill, HandoffId, PrefillToDecode

BACKENDS = ("fake", "spare")


@dataclass
class Stream:
    """Both directions of one stream."""

    handoff: HandoffId
    peer: str
    down: deque[DecodeToPrefill] = field(default_factory=deque)
    up: deque[PrefillToDecode] = field(default_factory=deque)
    backend: str = BACKENDS[0]  # what P publishes over
    open_at_decode: bool = True
    open_at_prefill: bool = True
    hushed: bool = False  # nothing that P says comes through, and D has noticed


@dataclass
class Client:
    """What the world knows of one request at D."""

    request: EngineRequest
    in_place: set[int]
    reserved: bool = False
    tokens: int = 0
    ends: list[str] = field(default_factory=list)
    error: RequestError | None = None  # when it has failed
    imported: dict[HandoffId, set[int]] = field(default_factory=dict)
    serial: int = 0
