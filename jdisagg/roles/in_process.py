"""Hand-off streams between two engines of one process (`colocated`): a post into the other engine's inbox."""

from __future__ import annotations

from typing import Any

from jdisagg.handoff.events import FromPrefill, PeerMessage, PeerOpened
from jdisagg.handoff.messages import DecodeToPrefill, HandoffId, Open, PrefillToDecode, StreamEnded
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.ports import PeerClient


class InProcessReply:
    """P's way back. Closing from P's side tells D that the stream ended."""

    def __init__(self, decode_inbox: Inbox, handoff: HandoffId) -> None:
        self._inbox = decode_inbox
        self._handoff = handoff

    def send(self, message: PrefillToDecode) -> None:
        """Post to D."""
        self._inbox.post(FromPrefill(self._handoff, message))

    def close(self) -> None:
        """Post the end to D; D drops it when it closed first."""
        self._inbox.post(FromPrefill(self._handoff, StreamEnded(reason="closed")))


class InProcessPeers(PeerClient):
    """Its only peer is the prefill engine next door, which lives and dies with this process."""

    ADDRESS = "in-process"

    def __init__(self, prefill_inbox: Inbox, decode_inbox: Inbox) -> None:
        self._prefill_inbox = prefill_inbox
        self._decode_inbox = decode_inbox

    def open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        """Open a stream to the prefill engine, which has no other receiver to keep room for."""
        self._prefill_inbox.post(PeerOpened(handoff, message, "", InProcessReply(self._decode_inbox, handoff)))

    def send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        """Post to P."""
        self._prefill_inbox.post(PeerMessage(handoff, message))

    def close(self, handoff: HandoffId) -> None:
        """Tell P that the stream ended."""
        self._prefill_inbox.post(PeerMessage(handoff, StreamEnded(reason="closed")))

    def failures(self) -> dict[str, str]:
        """Never any."""
        return {self.ADDRESS: ""}

    def snapshot(self) -> dict[str, Any]:
        """The other engine."""
        return {self.ADDRESS: {"backends": ["device_put"], "why_not": ""}}
