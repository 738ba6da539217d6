"""What entered and left an engine's prefix cache, as numbered batches: one per tick that changed something."""

from __future__ import annotations

import time
from collections.abc import Callable

from jdisagg.core.metrics import Metrics
from jdisagg.kv.events import Batch, PrefixJournal

BatchSink = Callable[[Batch], None]  # called by the engine thread; must not block


class KVEventFeed:
    """Drains one journal into one sink. Owned by the engine thread."""

    def __init__(
        self, journal: PrefixJournal, sink: BatchSink, metrics: Metrics, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives seconds since 1970: batches are read on other machines."""
        self._journal = journal
        self._sink = sink
        self._metrics = metrics
        self._clock = clock
        self._sequence = 0

    def publish(self) -> None:
        """Send on what changed since the last call, if anything."""
        events = self._journal.take()
        if not events:
            return
        self._sequence += 1
        for event in events:
            self._metrics.cache.events.labels(kind=type(event).__name__.lower()).inc()
        self._sink(Batch(self._sequence, self._clock(), events))
