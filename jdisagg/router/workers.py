"""The live fleet: registrations, one Run stream per decode or unified worker, eviction, reconnection.

A worker is lost when its stream breaks or falls silent, when its heartbeats stop, or when, after that, another process
registers at its address; each time `on_lost(entry, reason)` is called once. While such a process keeps heartbeating it is
connected again: `on_back(entry)`, also the first time.
Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from jdisagg.api.channels import Credentials
from jdisagg.api.tasks import AFTER_BUG_S, cancel_and_wait, start_in, until_set
from jdisagg.api.worker.client import CLOSED, SILENT, WorkerLink
from jdisagg.core.config import TransferConfig
from jdisagg.core.errors import Unavailable
from jdisagg.core.fleet import Key, LostWorker, Member, Report
from jdisagg.core.metrics import FleetMetrics
from jdisagg.core.requests import EngineRequest, Output
from jdisagg.router.entrance import Entrance
from jdisagg.router.entry import Entry
from jdisagg.router.fleet import Fleet
from jdisagg.router.usable import missing_without
from jdisagg.router.watch import FleetWatch
from jdisagg.router.worker_news import EVICTED, REPLACED, WorkerNews

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
STOOD_STILL_S = 1.0  # beyond a heartbeat: said in the log
STEADY_S = 0.5  # a stream that stood for so long is opened again at once, should it break


class Workers:
    """Who is registered, and the way to them."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        on_outputs: Callable[[list[Output]], None],
        on_lost: Callable[[Entry, str], None],
        on_back: Callable[[Entry], None],
        metrics: FleetMetrics,
        credentials: Credentials,
        entrance: Entrance,
    ) -> None:
        """`entrance`: who may register."""
        self.fleet = Fleet(dead_after_s=config.dead_after_s, lease_s=config.lease_s)
        self._config = config
        self._on_lost = on_lost
        self._on_back = on_back
        self._news = WorkerNews(metrics.lost)
        self.entrance = entrance
        self._link_to = partial(
            WorkerLink,
            config=config,
            on_outputs=on_outputs,
            credentials=credentials,
            router=uuid4().hex,  # by which workers know this process
        )
        self._links: dict[Key, WorkerLink] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = self._closed = False
        self._due_s = monotonic() + config.heartbeat_s  # when this process means to look again
        start_in(self._tasks, self._sweep_forever())

    # --- the workers' side

    def register(self, member: Member) -> None:
        """A worker is there, or there again. Raises AddressTaken while another process of its address is alive, Unfit for one
        of another model, and Unavailable once this router is closed."""
        if self._closed:
            raise Unavailable("the router is ending; register again when it is back")
        others = [other for other in self.fleet.members() if other.address != member.address]
        self.entrance.check(member, others, monotonic())
        now_s = self._excuse()
        known = self.fleet.process(member.address, member.epoch) is not None
        old = self.fleet.register(member, now_s)
        if not known and not member.decodes:
            self._news.registered(member)
        if old is not None:
            self._lose(old, REPLACED)
        if (entry := self.fleet.process(member.address, member.epoch)) is not None:
            self._hear(entry, is_new=not known)
        self._connect_missing()
        self._notify()

    def heartbeat(self, address: str, epoch: str, report: Report) -> Entry | None:
        """The process that sent it; None when it is not known."""
        entry = self.fleet.heartbeat(address, epoch, report, monotonic())
        if entry is not None:
            self._hear(entry)
        return entry

    def leave(self) -> None:
        """This router drains: that its workers do is no news then."""
        self._leaving = True

    def members(self) -> list[Member]:
        """Everybody alive."""
        return self.fleet.members()

    def lost(self) -> list[LostWorker]:
        """Who is not among them any more, the latest first."""
        return self._news.lost.lately(monotonic(), frozenset(entry.key for entry in self.fleet.entries()))

    # --- the router's side

    def submit(self, entry: Entry, request: EngineRequest) -> None:
        """Send a request to a linked worker."""
        self._links[entry.key].submit(request)

    def cancel(self, entry: Entry, request_id: str, attempt: int, *, enough: bool) -> None:
        """Have it forgotten, as its client has all that it wanted, or for another reason; fine when the worker is gone."""
        if (link := self._links.get(entry.key)) is not None:
            link.cancel(request_id, attempt, enough=enough)

    async def changed(self, timeout_s: float) -> None:
        """Wait for a worker to appear, at most `timeout_s`."""
        await until_set(self._changed, timeout_s)

    def snapshot(self) -> list[dict[str, Any]]:
        """Members as JSON-able data."""
        now_s = monotonic()
        return [entry.summary(now_s) for entry in self.fleet.entries()]

    async def close(self) -> None:
        """Close every stream, open no more and stop every task; who waits for a worker looks again. `on_lost` is not called."""
        self._closed = True
        self._notify()
        await cancel_and_wait(*self._tasks)
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    # --- inside

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _sweep_forever(self) -> None:
        watch = FleetWatch()
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            try:
                self._sweep(watch)
            except Exception:  # a bug of ours: without sweeps nobody would be evicted, or connected again
                log.exception("looking after the workers failed; looking again")
                self._due_s = monotonic() + AFTER_BUG_S + self._config.heartbeat_s
                await asyncio.sleep(AFTER_BUG_S)

    def _sweep(self, watch: FleetWatch) -> None:
        now_s = self._excuse()
        self._due_s = now_s + self._config.heartbeat_s
        for entry in self.fleet.evict(now_s):
            self._lose(entry, EVICTED)
        self._connect_missing()
        for why in watch.look(self.fleet.members(), monotonic()):
            log.warning("%s", why)

    def _excuse(self) -> float:
        """What this process is late by is not the workers' silence, whichever message it reads first; returns the time."""
        now_s = monotonic()
        late_s = now_s - self._due_s
        if late_s >= STOOD_STILL_S:
            log.warning("this process stood still for %.1f s (stopped, or its machine was): its streams may end", late_s)
        if late_s > 0.0:
            self.fleet.forgive(late_s, now_s)
            self._due_s = now_s
        return now_s

    def _connect_missing(self) -> None:
        now_s = monotonic()
        for entry in self.fleet.entries():
            if entry.member.decodes and entry.key not in self._links and entry.reach.retry_at_s <= now_s:
                self._links[entry.key] = self._link_to(
                    entry.member.address,
                    epoch=entry.member.epoch,
                    on_up=partial(self._up, entry),
                    on_down=partial(self._down, entry),
                    on_load=partial(self.fleet.tell_load, entry),
                    on_quiet=partial(self._quiet, entry),
                    waits=partial(self._waits, entry),
                )

    def _up(self, entry: Entry) -> None:
        self.fleet.link(entry, monotonic())
        self._news.connected(entry)
        self._on_back(entry)
        self._notify()

    def _quiet(self, entry: Entry, is_quiet: bool) -> None:
        if entry.stream is None:
            return
        was_awaited, now_s = entry.is_awaited, monotonic()
        silent_s = now_s - (entry.stream.quiet_s or now_s)
        self.fleet.tell_quiet(entry, is_quiet, now_s)
        if was_awaited and not entry.is_awaited:
            self._news.heard_again(entry, silent_s)
            self._notify()

    def _waits(self, entry: Entry, silent_s: float) -> bool:
        was_awaited = entry.is_awaited
        waits = self.fleet.waits(entry, silent_s, monotonic())
        if waits and not was_awaited:
            self._news.waited_for(entry, self._config.lease_s)
        return waits

    def _down(self, entry: Entry, reason: str) -> None:
        """The link ended by itself."""
        self._links.pop(entry.key, None)
        now_s = monotonic()
        broken = entry.stream if reason not in (CLOSED, SILENT) else None
        at_once = broken is not None and now_s - broken.since_s > STEADY_S  # it may be the connection alone: nobody died then
        entry.reach.retry_at_s = now_s + (0.0 if at_once else RECONNECT_S)
        if not entry.linked:
            entry.reach.missing_since_s = entry.reach.missing_since_s or now_s
            entry.reach.misses += 1
        self._news.not_linked(entry, reason)
        self._gone(entry, reason)
        if at_once and not self._closed:
            self._connect_missing()

    def _hear(self, entry: Entry, *, is_new: bool = False) -> None:
        """What it says of itself may be news. A new one may have come before those that do its work, as behind a restart of
        this router."""
        if entry.member.draining and not entry.is_drain_told:
            self._news.drains(entry, "" if is_new or self._leaving else missing_without(entry, self.fleet.entries()))
        if self._news.readiness(entry):
            self._notify()

    def _lose(self, entry: Entry, reason: str) -> None:
        """The process is not a member any more."""
        link = self._links.pop(entry.key, None)
        if link is not None:
            link.abandon()
            start_in(self._tasks, link.close())
        self._gone(entry, reason)

    def _gone(self, entry: Entry, reason: str) -> None:
        was_linked, entry.stream, now_s = entry.linked, None, monotonic()
        self.fleet.suspect(entry, now_s)
        if was_linked or not entry.member.decodes:
            self._news.gone(entry, reason, now_s)
        self._on_lost(entry, reason)
