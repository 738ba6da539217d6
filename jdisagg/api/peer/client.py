"""D's side of PeerService: `roles.ports.PeerClient` over one event loop.

Engine threads call `open`, `send` and `close`, which cross to the loop in order; answers are posted as FromPrefill. Exactly
one StreamEnded ends every stream that D did not close itself. A stream whose P restarted at the same address, seen by a
refused epoch or a dead connection before P had taken it, is opened once more with everything sent so far; nothing else is
retried here: the recovery ladder is `handoff`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from random import random
from time import monotonic
from typing import Any

from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.peer.book import PeerBook
from jdisagg.api.peer.link import HelloFailed, PeerLink
from jdisagg.api.peer.links import PeerLinks
from jdisagg.api.peer.presence import Presence
from jdisagg.api.peer.stream import UNCLEAR, PeerStream, cleared_up
from jdisagg.api.tasks import call_on, cancel_and_wait, start_in
from jdisagg.api.turns import Turns
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Unavailable
from jdisagg.core.speed import Speed
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.identity import Identity
from jdisagg.handoff.messages import DecodeToPrefill, HandoffId, Lives, Open, StreamEnded

log = logging.getLogger(__name__)


class GrpcPeerClient:
    """All of one D's hand-off streams and peer connections."""

    def __init__(
        self,
        identity: Identity,
        *,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[FromPrefill], None],
        config: TransferConfig,
        credentials: Credentials = INSECURE,
    ) -> None:
        """`post` must be thread-safe and not block."""
        self._identity = identity
        self._loop = loop
        self._post = post
        self._config = config
        self._credentials = credentials
        self._links = PeerLinks(self._make_link, start=self._start)
        self._streams: dict[HandoffId, PeerStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._book = PeerBook()
        self._presence = Presence(
            ask=self._ask,
            is_good=lambda peer: self._book.why(peer) == "",
            is_heard=lambda peer: (link := self._links.find(peer)) is not None and link.is_used,
            start=self._start,
            draw=random,
            clock=monotonic,
        )
        self._turns = Turns()
        self._closed = False

    # --- any thread

    def open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        """Open the hand-off's stream; see PeerClient."""
        self._cross(self._open, peer, handoff, message)

    def send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        """Send on an open stream; dropped when it is gone."""
        self._cross(self._send, handoff, message)

    def close(self, handoff: HandoffId) -> None:
        """End the stream; idempotent, no StreamEnded follows."""
        self._cross(self._close, handoff)

    def watch(self, peers: tuple[str, ...]) -> None:
        """Keep asking these peers whether they are there, so that `failures` knows before the first request."""
        for peer in peers:
            self._cross(self._presence.watch, peer)

    def is_down(self, peer: str) -> bool:
        """Whether it could not be used the last time; only of peers that are asked again and again. Others are found out by
        hand-offs."""
        return self._presence.is_asked(peer) and bool(self._book.why(peer))

    def is_doubtful(self, peer: str) -> bool:
        """Whether it did not pair with this worker last time, or could not be reached a moment ago, or its KV did not come;
        forgotten like everything else of peers that nobody asks."""
        return self._book.is_doubtful(peer, monotonic())

    def is_unlike(self, peer: str) -> bool:
        """Whether it said that it computes other bits."""
        return self._book.is_unlike(peer, self._identity.bits)

    def speed(self, peer: str) -> Speed | None:
        """At which it said that it computes prompts."""
        return self._book.speed(peer, monotonic())

    def no_kv(self, peer: str, why: str) -> None:
        """The peer answers, and what it publishes does not come; see PeerBook."""
        self._cross(self._book.no_kv, peer, why, monotonic())

    def kv_came(self, peer: str) -> None:
        """All that one prompt needed did come."""
        self._cross(self._book.kv_came, peer)

    def unreached(self, peer: str, backend: str, why: str) -> None:
        """Nothing is reached there over that backend; see PeerPorts."""
        self._cross(self._unreached, peer, backend, why)

    def failures(self) -> dict[str, str]:
        """Peers spoken to, and why each cannot be used; "" = it can."""
        return self._book.whys()

    def obstacles(self) -> dict[str, str]:
        """The same where nothing is computed here, so that a peer is of no use either whose KV does not come. For /ready."""
        return self._book.obstacles(monotonic())

    def snapshot(self) -> dict[str, Any]:
        """The same peers, and what KV comes over from each, for debug state."""
        return self._book.snapshot()

    # --- the loop

    def offer(self, peers: frozenset[str]) -> None:
        """These are all prefill workers there are, until it is called again: what has no stream and is none of them has left,
        and those that are new, or failed, or were not heard for a while, are asked whether they are there."""
        if not self._closed:
            self._presence.offer(peers)
            self._forget(peer for peer in self._book.known() if peer not in peers)

    async def aclose(self) -> None:
        """End every stream, close every channel, stop every task. Posts nothing more."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()
        await cancel_and_wait(*self._tasks)
        await self._links.close()

    def _cross(self, function: Callable[..., Any], *arguments: Any) -> None:
        call_on(self._loop, function, *arguments)

    def _start(self, coroutine: Any) -> None:
        if self._closed:
            coroutine.close()
            return
        start_in(self._tasks, coroutine)

    def _open(self, peer: str, handoff: HandoffId, message: Open) -> None:
        if self._closed:
            return
        assert handoff not in self._streams, f"{handoff} is open already"
        stream = PeerStream(peer, message, self._config)
        self._streams[handoff] = stream
        self._start(self._run(handoff, stream))

    def _send(self, handoff: HandoffId, message: DecodeToPrefill) -> None:
        stream = self._streams.get(handoff)
        if stream is not None and not isinstance(message, Open | StreamEnded):
            stream.send(message)

    def _close(self, handoff: HandoffId) -> None:
        stream = self._streams.pop(handoff, None)
        if stream is not None:
            stream.close()

    async def _run(self, handoff: HandoffId, stream: PeerStream) -> None:
        """The stream's whole life."""
        ended = StreamEnded(reason="dead")
        try:
            ended = await self._live(handoff, stream)
        except BaseException as error:
            if self._closed:
                raise
            # a bug of ours or of grpc: the hand-off recovers, the log says from what
            log.exception("%s on prefill peer %s ended without a status", handoff, stream.peer)
            ended = StreamEnded(reason="closed", error=Unavailable(f"prefill peer {stream.peer}: {error!r}"))
            if not isinstance(error, Exception):  # else asyncio would log it once more: nobody awaits this
                raise
        finally:
            if self._streams.get(handoff) is stream:
                del self._streams[handoff]
                if not self._closed:
                    self._post(FromPrefill(handoff, ended))

    async def _live(self, handoff: HandoffId, stream: PeerStream) -> StreamEnded:
        ended = StreamEnded(reason="closed")
        for second in (False, True):
            link = self._links.of(stream.peer)
            with link.in_use():
                try:
                    theirs = await link.hello(again=second)
                    reached = await link.reach(theirs, begins=True)
                except HelloFailed as error:
                    self._failed(link, error.error.message, refuses=error.reason == "hello")
                    return StreamEnded(reason=error.reason, error=error.error)
                self._answered(link, theirs)
                if stream.grammar not in (None, *theirs.grammars):
                    if not second:  # it may be another process since it said so
                        continue
                    error = Unavailable(f"prefill peer {stream.peer}: it does not serve {stream.grammar.value} grammars")
                    return StreamEnded(reason="hello", error=error)
                self._book.agreed(stream.peer, reached)
                await self._turns.wait()
                if stream.closed:
                    break
                deliver = partial(self._deliver, handoff, stream)
                ended = await stream.run(link, theirs, reached.backends, deliver)
                if ended.reason == UNCLEAR:
                    ended = await cleared_up(ended, link, theirs.epoch)
                if ended.reason in ("dead", "heartbeat"):
                    ended = replace(ended, is_death=stream.taken)
                    self._failed(link, ended.error.message if ended.error else ended.reason)
                if ended.reason == "dead" and ended.is_death:
                    self._start(self._ask_whether_it_lives(handoff, stream.peer, theirs.epoch))
            if stream.taken or ended.reason not in ("dead", "epoch"):
                break
        return StreamEnded(reason="hello", error=ended.error) if ended.reason == "epoch" else ended

    async def _ask_whether_it_lives(self, handoff: HandoffId, peer: str, epoch: str) -> None:
        """A proxy, say, may have cut the connection. The hand-off goes on meanwhile: whose machine is gone does not answer."""
        link = self._links.of(peer)
        with link.in_use():
            try:
                theirs = await link.hello(again=True)  # it may have answered before
            except HelloFailed:
                self._links.give_up(link)
                return
        if theirs.epoch == epoch:
            self._post(FromPrefill(handoff, Lives(peer)))

    def _deliver(self, handoff: HandoffId, stream: PeerStream, message: Any) -> None:
        if self._streams.get(handoff) is stream:
            self._post(FromPrefill(handoff, message))

    def _make_link(self, peer: str) -> PeerLink:
        is_registered, dead_after_s = not self._presence.is_watched(peer), self._config.dead_after_s
        return PeerLink(peer, self._identity, self._credentials, is_registered=is_registered, dead_after_s=dead_after_s)

    def _unreached(self, peer: str, backend: str, why: str) -> None:
        if (link := self._links.find(peer)) is not None:
            link.unreached(backend, why)

    def _answered(self, link: PeerLink, theirs: Identity) -> None:
        if not self._links.is_current(link):
            return  # given up since
        if link.draining:  # what it has taken on goes on
            self._book.drains(link.peer)
        else:
            self._book.answered(link.peer)
        self._book.computes(link.peer, theirs.bits, self._identity.bits)
        self._book.computes_at(link.peer, *link.speed)

    def _failed(self, link: PeerLink, why: str, *, refuses: bool = False) -> None:
        """Forget the connection: the next stream makes a new one."""
        if self._links.is_current(link):
            self._book.failed(link.peer, why, monotonic(), refuses=refuses)
        self._links.give_up(link)

    def _forget(self, peers: Iterable[str]) -> None:
        """Nobody offers these any more, most of them are dead: their connections and what was known of them go."""
        busy = {stream.peer for stream in self._streams.values()}
        for peer in peers:
            if peer not in busy and not self._presence.is_asked(peer):
                self._book.forget(peer)
                if (link := self._links.find(peer)) is not None:
                    self._links.give_up(link)

    async def _ask(self, peer: str) -> None:
        """Whether it is there: `failures` knows then. What is raised is a bug of ours or of grpc; it may be asked again, over a
        new connection."""
        link = self._links.of(peer)
        try:
            with link.in_use():
                theirs = await link.hello(again=True)
                await link.reach(theirs, begins=False)  # so that it is known before the first request
                self._answered(link, theirs)
        except HelloFailed as error:
            self._failed(link, error.error.message, refuses=error.reason == "hello")
        except Exception as error:
            self._failed(link, repr(error))
            raise
        finally:
            if not self._presence.is_asked(peer):  # since then
                self._forget((peer,))
