"""What the carriers of hand-off streams (gRPC, in-process) post to an engine's inbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jdisagg.handoff.messages import DecodeToPrefill, HandoffId, Open, PrefillToDecode


class ReplyStream(Protocol):
    """P's way back to the D of one hand-off. Never blocks, thread-safe."""

    def send(self, message: PrefillToDecode) -> None:
        """Send; dropped when the stream is gone."""
        ...

    def close(self) -> None:
        """End the stream from P's side."""
        ...


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """At P: a D opened a stream. `handoff` is unique at this P; `peer` is the D, whose streams share the room for pieces."""

    handoff: HandoffId
    message: Open
    peer: str
    reply: ReplyStream


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """At P: a later message of an open stream; exactly one StreamEnded closes it, whatever ended it."""

    handoff: HandoffId
    message: DecodeToPrefill


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """At P: the D of an open stream was heard, now and then: its leases go on."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class FromPrefill:
    """At D: a message of P on the stream `handoff`."""

    handoff: HandoffId
    message: PrefillToDecode
