"""A worker's transfers with the faults of a `Drill`: wraps what a deployment builds, or hands it through untouched.

Every fault made is one line "injected fault: KIND" in the log, so that whoever runs the drill can count them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from jdisagg.core.drill import Drill
from jdisagg.core.latest import remember
from jdisagg.handoff.events import FromPrefill
from jdisagg.handoff.messages import ChunkReady, HandoffId
from jdisagg.transfer.base import Fetcher, Piece, Post, Publisher
from jdisagg.transfer.faulty import Fault, FaultyByteSource, FaultyFetcher
from jdisagg.transfer.host_backend import ByteSource

log = logging.getLogger(__name__)

MOST_REMEMBERED = 256  # requests whose last message may come again
_BYTES = (Fault.CORRUPT, Fault.SCRAMBLE, Fault.TRUNCATE, Fault.DISCONNECT, Fault.MISSING, Fault.SLOW)
_EVENTS = (Fault.ERROR_ARRAY, Fault.LATE, Fault.DUPLICATE)
Listener = Callable[[FromPrefill], None]


class TransferDrill:
    """Wrappers for the parts of one worker."""

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    def byte_source(self, inner: ByteSource) -> ByteSource:
        """Bytes that come wrong, short, late or not at all."""
        plan = self._plan(*_BYTES)
        return inner if plan is None else FaultyByteSource(inner, plan)

    def fetcher(self, make: Callable[[Post], Fetcher], post: Post) -> Fetcher:
        """The fetcher that `make` builds around a Post; its answers come twice, too late, or as error arrays."""
        plan = self._plan(*_EVENTS)
        return make(post) if plan is None else FaultyFetcher(make, post, plan)

    def publisher(self, inner: Publisher) -> Publisher:
        """One that never lets go of a piece, if that is what is drilled."""
        return KeepingPublisher(inner) if self._drill.has("leases_ignored") else inner

    def messages(self, post: Listener) -> Listener:
        """What P says, some of it twice, some of it again after the stream was replaced."""
        plan = self._drill.plan("duplicate_message")
        return post if plan is None and not self._drill.has("late_message") else _Echo(post, plan, self._drill)

    def _plan(self, *faults: Fault) -> Iterator[Fault | None] | None:
        plan = self._drill.plan(*(fault.value for fault in faults))
        return None if plan is None else map(_made, plan)  # a generator would not do: several threads fetch


def _made(kind: str | None) -> Fault | None:
    if kind is None:
        return None
    log.info("injected fault: %s", kind)
    return Fault(kind)


class KeepingPublisher:
    """A Publisher whose pieces are never freed: what the release of a hand-off is there to prevent."""

    def __init__(self, inner: Publisher) -> None:
        self._inner = inner
        self.name = inner.name

    def publish(self, handoff: HandoffId, key: str, piece: Piece) -> None:
        """As the real one."""
        self._inner.publish(handoff, key, piece)

    def discard(self, key: str) -> None:
        """Nothing."""
        log.info("injected fault: leases_ignored")

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes the real one holds."""
        return self._inner.num_buffered_bytes

    def close(self) -> None:
        """Close the real one."""
        self._inner.close()


class _Echo:
    """Passes messages of P on; announcements twice by plan, and an old stream's last one once more after a newer began.

    Used on one event loop.
    """

    def __init__(self, post: Listener, plan: Iterator[str | None] | None, drill: Drill) -> None:
        self._post = post
        self._plan = plan
        self._late = drill.has("late_message")
        self._last: dict[str, FromPrefill] = {}  # by request

    def __call__(self, event: FromPrefill) -> None:
        request_id = event.handoff.request_id
        earlier = self._last.pop(request_id, None)
        self._post(event)
        if self._late and earlier is not None and earlier.handoff.serial < event.handoff.serial:
            log.info("injected fault: late_message")
            self._post(earlier)
        if isinstance(event.message, ChunkReady) and self._plan is not None and next(self._plan) is not None:
            log.info("injected fault: duplicate_message")
            self._post(event)
        remember(self._last, request_id, event, MOST_REMEMBERED)
