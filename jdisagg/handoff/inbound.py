"""One hand-off as D sees it: what the request needs, and the stream that is bringing it now.

Without a stream it waits: there is nobody to ask just now. When it is complete, failed, local or released, its record is gone.
Having pages (`reserved`) is independent of the stream: that is opened, answered, and may end before memory exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jdisagg.core.errors import DeadlineExceeded, Deadly, HandoffLost, RequestError, Unavailable
from jdisagg.core.requests import EngineRequest, Output, Provenance
from jdisagg.handoff.actions import DecodeAction, Hedged, PeerReady, Recovered
from jdisagg.handoff.inbound_stream import NOT_ACCEPTED, InboundStage, InboundStream
from jdisagg.handoff.ladder import Ladder
from jdisagg.handoff.messages import ChunkReady, Done, HandoffId, Open, PrefillToDecode, Started, StreamEnded

MAX_PIECE_BYTES = 2**34  # of any model: credit and time for a fetch are counted before its bytes are compared with its shape


@dataclass(frozen=True, slots=True)
class Doubted:
    """A stream set aside while another peer is asked as well, and since when. What is being fetched for it may still arrive,
    and counts."""

    stream: InboundStream
    silent_s: float  # nothing had come for so long
    since_s: float
    no_kv: bool = False  # it may say what it will: its KV did not come

    @property
    def has_shown_work(self) -> bool:
        """Its peer has computed some or all of the prompt."""
        return self.stream.stage in (InboundStage.TRANSFERRING, InboundStage.COMPUTED)

    def is_behind(self, message: PrefillToDecode) -> bool:
        """Whether what the other P says puts it ahead of the one that is quiet."""
        if isinstance(message, Done):
            return message.first.error is None
        return isinstance(message, ChunkReady) or (isinstance(message, Started) and not self.has_shown_work)


@dataclass(slots=True)
class Inbound:
    """One request whose KV comes from elsewhere."""

    request: EngineRequest
    held_tokens: int  # [0, held_tokens) is in place here
    ladder: Ladder
    stream: InboundStream | None = None  # None: another one is asked for at `retry_at_s`
    doubted: Doubted | None = None  # `stream` is then the hedge, and has brought nothing yet
    reserved: bool = False
    retry_at_s: float = 0.0
    first: Output | None = None  # as it was delivered
    computed: Provenance | None = None  # what the last P to compute the prompt says of itself
    arrived: Provenance = field(default_factory=Provenance)  # what was brought, the last of it by `prefill_worker`; rungs taken

    def wait(self, now_s: float, *, had_begun: bool) -> list[DecodeAction]:
        """Nobody can be asked just now: pause. `had_begun`: the peer that was lost, so that pages could be reserved."""
        self.retry_at_s = now_s + self.ladder.pause(now_s)
        return [PeerReady(self.request.request_id, is_ready=False)] if had_begun else []

    def grant(self) -> list[DecodeAction]:
        """Let P publish more, once there are pages; nothing for a request that needs no KV (any more)."""
        if self.stream is None or not self.reserved or not self.needs_kv or self.covered:
            return []
        return self.stream.grant()

    def ended(self, stream: InboundStream, message: StreamEnded) -> None:
        """`stream` is over."""
        if message.is_death:
            self.ladder.went_down(stream.peer, silently=message.reason == "heartbeat")

    def stream_of(self, handoff: HandoffId) -> InboundStream | None:
        """The stream, if it is this one's: the current or the doubted one."""
        streams = (self.stream, None if self.doubted is None else self.doubted.stream)
        return next((stream for stream in streams if stream is not None and stream.handoff == handoff), None)

    def doubt_about(self, stream: InboundStream) -> Doubted | None:
        """The doubt that `stream` was set aside for; None when it is the one in use."""
        return self.doubted if self.doubted is not None and self.doubted.stream is stream else None

    def ask(self, now_s: float) -> list[DecodeAction]:
        """Credit, and fetches of what is announced and not being fetched, once there are pages."""
        stream = self.stream
        if stream is None or not self.reserved:
            return []
        waiting = [piece for piece in stream.pieces.values() if piece.fetch_deadline_s is None]
        return [*self.grant(), *(stream.fetch(piece, self.request.deadline_s, now_s) for piece in waiting)]

    def hang_up(self) -> list[DecodeAction]:
        """Drop the stream and a doubted one; what they brought without a gap stays."""
        hedge = self.stream.peer if self.stream else ""
        actions = self._keep_and_drop()
        if self.doubted is not None:
            quiet = self.go_back().stream.peer
            actions += [*self._keep_and_drop(), Hedged("abandoned", self.request.request_id, quiet, hedge)]
        return actions

    def set_aside(self, silent_s: float, now_s: float, *, no_kv: bool) -> None:
        """Doubt the stream, not drop it; what it brought without a gap counts for the next one."""
        assert self.stream is not None
        self.doubted = Doubted(self.stream, silent_s, now_s, no_kv)
        self.held_tokens = self.stream.imported.reach(self.held_tokens)
        self.stream = None

    def go_back(self) -> Doubted:
        """The doubted stream is the one again."""
        assert self.doubted is not None
        doubted, self.doubted = self.doubted, None
        self.stream = doubted.stream
        return doubted

    def _keep_and_drop(self) -> list[DecodeAction]:
        stream, self.stream = self.stream, None
        if stream is None:
            return []
        self.held_tokens = stream.imported.reach(self.held_tokens)
        return stream.close()

    def note(self, rung: str, stream: InboundStream | None, cause: str) -> Recovered:
        """A rung of the ladder is taken because of `stream`, None = there was nobody to ask."""
        self.arrived = replace(self.arrived, recoveries=(*self.arrived.recoveries, rung))
        return Recovered(rung, self.request.request_id, stream.peer if stream else "", stage_of(stream), cause)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV must be in place, whoever computes them."""
        return self.request.num_tokens

    @property
    def needs_kv(self) -> bool:
        """A request with one token to go ends with P's token: nothing is transferred for it."""
        return self.request.remaining_tokens > 1

    @property
    def covered(self) -> bool:
        """Whether KV of every token is in place."""
        stream_reach = self.held_tokens if self.stream is None else self.stream.imported.reach(self.held_tokens)
        return stream_reach >= self.num_tokens

    def complaint(self, stream: InboundStream, ready: ChunkReady, chunk_tokens: int) -> str | None:
        """What is wrong with a piece that was announced on `stream`, or None."""
        span = f"piece [{ready.begin}, {ready.end})"
        if not 0 <= ready.group < stream.announced.num_groups:
            return f"{span} is of KV group {ready.group}; this cache has {stream.announced.num_groups}"
        if not self.held_tokens <= ready.begin < ready.end <= self.num_tokens:
            return f"{span} lies outside [{self.held_tokens}, {self.num_tokens})"
        if ready.end - ready.begin > chunk_tokens:
            return f"{span} is longer than --transfer-chunk-tokens {chunk_tokens}"
        if not 0 <= ready.num_bytes <= MAX_PIECE_BYTES:
            return f"{span} is announced with {ready.num_bytes} bytes"
        if ready.backend not in ("", *stream.backends):
            return f"{span} is announced over {ready.backend!r}, wanted one of {', '.join(stream.backends)}"
        if stream.announced.of(ready.group).overlaps(ready.begin, ready.end):
            return f"{span} was announced before"
        return None

    def computed_by(self, provenance: Provenance | None) -> None:
        """P has said with its first token who it is, and what it fetched from here."""
        self.computed = provenance
        if provenance is not None:
            self.arrived = replace(
                self.arrived,
                borrowed_tokens=self.arrived.borrowed_tokens + provenance.borrowed_tokens,
                borrowed_bytes=self.arrived.borrowed_bytes + provenance.borrowed_bytes,
            )

    def signed(self, provenance: Provenance | None) -> Provenance | None:
        """What P says of a request that ends with its token, and the rungs that were taken until then."""
        taken = self.arrived.recoveries
        return replace(provenance or Provenance(), recoveries=taken) if taken else provenance

    def provenance(self) -> Provenance:
        """Where the KV came from, as far as this side knows; pages and the decode worker are for the role to fill in.

        Several P may have had a part in it: named is the one that brought the last of it, not who sampled the first token.
        """
        assert self.stream is not None, f"request {self.request.request_id}: complete without a stream"
        known = self.computed or Provenance()
        return replace(
            self.arrived,
            prefill_worker=known.prefill_worker or self.stream.peer,
            prefilled_tokens=known.prefilled_tokens or self.num_tokens - self.stream.cached_tokens,
        )

    def take(self, ready: ChunkReady, peer: str) -> None:
        """A piece has arrived from `peer`."""
        self.arrived = replace(
            self.arrived,
            prefill_worker=peer,
            transferred_tokens=self.arrived.transferred_tokens + ready.end - ready.begin,
            transferred_bytes=self.arrived.transferred_bytes + ready.num_bytes,
        )

    @property
    def is_covered_by_doubted(self) -> bool:
        """Whether the doubted stream has brought all that it was to bring, the first token included."""
        doubted = self.doubted
        if doubted is None or doubted.stream.stage is not InboundStage.COMPUTED or not self.reserved:
            return False
        return doubted.stream.imported.reach(self.held_tokens) >= self.num_tokens

    def opening(self, backend: str, head_shards: int, max_piece_tokens: int, eos_token_ids: tuple[int, ...]) -> Open:
        """What P is asked to compute and send.

        Which tokens end the request is D's to say, so `eos_token_ids` come as stop ids: P's copy of the model may name others.

        Once a first token was delivered, later streams fetch the same KV and their token is ignored, so it must not end
        the request at P before the KV was sent. It is not added to the request, whose KV would be another: P hears of it.

        Who comes again when P is full is shared out among the P that are asked, as it is among the D that a router asks.
        """
        sampling = self.request.sampling
        if self.first is not None:
            sampling = replace(sampling, ignore_eos=True, stop_token_ids=(), logprobs=None, prompt_logprobs=None)
        elif eos_token_ids and not sampling.ignore_eos:
            ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_token_ids)))
            sampling = replace(sampling, ignore_eos=True, stop_token_ids=ends)
        return Open(
            request=replace(self.request, sampling=sampling, num_asked=len(self.ladder.peers)),
            held_tokens=self.held_tokens,
            backend=backend,
            head_shards=head_shards,
            max_piece_tokens=max_piece_tokens,
            goes_on=self.first is not None or bool(self.request.generated_token_ids),
        )

    def too_late(self) -> DeadlineExceeded:
        """The error of a request whose deadline passed in the hand-off."""
        stream, stage = self.stream, stage_of(self.stream)
        where = "without a prefill worker" if stream is None else f"with {stream.peer}"
        if (stream is None or stream.stage in NOT_ACCEPTED) and (why := self.ladder.had_no_room):
            where = f"{where}; {why}"
        return DeadlineExceeded(f"request {self.request.request_id}: deadline passed in the hand-off at stage {stage} {where}")

    def lost(self, stream: InboundStream | None, cause: str) -> RequestError:
        """The error of a request for which every rung failed, the last one with `stream`."""
        peer = stream.peer if stream else ""
        request_id, advice = self.request.request_id, "--local-prefill never forbids computing it here"
        if not self.ladder.peers:
            advice = f"{advice}; name one with --prefill, or have one register with this worker's --router"
            return Unavailable(f"request {request_id}: {cause}, and {advice}")
        last = "" if peer in cause else f" with {peer}"
        others = ", ".join(other for other in self.ladder.peers if other != peer)
        tried = f"; {others} tried before" if others else ""
        text = f"request {request_id}: hand-off lost at stage {stage_of(stream)}{last}: {cause}{tried}"
        if num_down := self.ladder.num_deaths:
            who = "they" if num_down > 1 else "the worker"
            return Deadly(f"{text}; {who} may have died of it; {advice}", num_down=num_down)
        return HandoffLost(f"{text}; {advice}")

    def outgrown(self, verdict: RequestError) -> HandoffLost:
        """The error of a stream that is longer by now than any prefill worker takes: no fault of its client."""
        text = (
            f"request {self.request.request_id}: its KV is gone, and its prompt and output, {self.num_tokens} tokens, are more"
        )
        advice = "give prefill workers the pages and --max-model-len of the decode workers, or allow local prefill"
        return HandoffLost(f"{text} than any prefill worker takes ({verdict.message}); {advice}")

    def summary(self) -> dict[str, Any]:
        """JSON-able state."""
        stream = self.stream
        return {
            "stage": stage_of(stream),
            "reserved": self.reserved,
            "peer": stream.peer if stream else "",
            "doubted_peer": self.doubted.stream.peer if self.doubted else "",
            "backends": list(stream.backends) if stream else [],
            "broken_backends": sorted(stream.broken) if stream else [],
            "serial": stream.handoff.serial if stream else 0,
            "held_tokens": self.held_tokens,
            "num_tokens": self.num_tokens,
            "pieces_on_the_way": len(stream.pieces) if stream else 0,
            "recoveries": list(self.arrived.recoveries),
        }


def stage_of(stream: InboundStream | None) -> str:
    """For people."""
    return "waiting" if stream is None else stream.stage.value
