"""What a role needs from outside, as Protocols: the runner below it and the peers above it. `serve` wires the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jdisagg.core.requests import Output
from jdisagg.core.speed import Speed
from jdisagg.handoff.messages import DecodeToPrefill, HandoffId, Open
from jdisagg.sched.plan import PageTable, Plan, StepResult
from jdisagg.transfer.base import Piece


class Runner(Protocol):
    """The device side of one mesh. Called by its engine thread only."""

    def dispatch(self, plan: Plan) -> Any:
        """Start one step without waiting for it; returns a handle for `collect`."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a dispatched step and read its tokens."""
        ...

    def export_tokens(self, page_table: PageTable, begin: int, end: int) -> Piece:
        """Gather KV of tokens [begin, end) (at most `chunk_tokens`) into a fresh array, ordered after every dispatched step."""
        ...

    def import_tokens(self, page_table: PageTable, piece: Piece) -> None:
        """Scatter a confirmed piece into the pages of `page_table`, ordered before every later step."""
        ...


class PeerClient(Protocol):
    """D's way to P. Never blocks; answers are posted as `handoff.events.FromPrefill`. One that hears nothing else of its peers
    inherits that nothing is known against them."""

    def open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        """Open the hand-off's stream; Hello runs first when this pair has not spoken in this epoch."""
        ...

    def send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        """Send on an open stream; silently dropped when the stream is gone (StreamEnded says so)."""
        ...

    def close(self, handoff: HandoffId) -> None:
        """End the stream; idempotent. No StreamEnded follows."""
        ...

    def is_down(self, peer: str) -> bool:
        """The peer is asked again and again by itself, and did not answer last time: no request need find that out."""
        return False

    def is_doubtful(self, peer: str) -> bool:
        """When the peer was spoken to last, it did not pair with this worker, or could not be reached, or its KV did not come,
        and that a moment ago: others are asked first."""
        return False

    def is_unlike(self, peer: str) -> bool:
        """The peer is known to compute other bits than this worker, see `jdisagg.core.bits`."""
        return False

    def speed(self, peer: str) -> Speed | None:
        """At which the peer computes prompts, as far as is known, see `jdisagg.core.speed`."""
        return None

    def no_kv(self, peer: str, why: str) -> None:
        """The peer answers, and what it publishes does not come: it is doubtful for a while."""

    def kv_came(self, peer: str) -> None:
        """It does come after all: the peer is of use to a worker that computes no prompts."""

    def unreached(self, peer: str, backend: str, why: str) -> None:
        """Nothing is reached at the peer over that backend: for a while hand-offs begin over others."""

    def failures(self) -> dict[str, str]:
        """Peers spoken to, and why each cannot be used; "" = it can."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The same peers, and what KV comes over from each, as JSON-able data."""
        ...


OutputSink = Callable[[list[Output]], None]  # called once per tick by the engine thread; must not block
