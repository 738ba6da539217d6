"""What one engine tick shows: queue lengths, pages, step times and counters on /metrics, cache changes to a feed."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.fleet import Load
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.core.speed import Speed
from jdisagg.roles.gauge_share import GaugeShare
from jdisagg.roles.kv_feed import KVEventFeed
from jdisagg.roles.pipeline import Turn
from jdisagg.roles.speed_seen import SpeedSeen
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler

SEQUENCES_PER_TICK = 256  # that are looked at for `pending_prefill_tokens`, on average: of thousands every so many ticks


class TickObserver:
    """Publishes the scheduler's state of one engine; `load` is replaced whole every tick, so that any thread may read it.

    Two engines of one process (colocated) add up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        role: Role,
        kv_feed: KVEventFeed | None = None,
        speed: SpeedSeen | None = None,
    ) -> None:
        """`speed`: of a prefill worker, whose load tells it."""
        self.load = Load()
        self._scheduler = scheduler
        self._metrics = metrics
        self._role = role
        self._kv_feed = kv_feed
        self._speed = speed
        self._pending_age = 0  # ticks
        self._seen = replace(scheduler.stats)
        self._requests = {state: GaugeShare(metrics.requests.live.labels(state=state)) for state in scheduler.counts()}
        self._free_pages, self._used_pages = GaugeShare(metrics.cache.pages_free), GaugeShare(metrics.cache.pages_used)
        self._host_tokens = GaugeShare(metrics.cache.host_held)

    def observe(self, turn: Turn, num_unfinished: int, now_s: float) -> None:
        """After a tick, which ended at `now_s`; `num_unfinished`: requests of clients and of other workers."""
        scheduler, metrics = self._scheduler, self._metrics
        counts = scheduler.counts()
        for state, count in counts.items():
            self._requests[state].show(count)
        free, total = scheduler.num_free_pages, scheduler.num_pages
        self._free_pages.show(free)
        self._used_pages.show(total - free)
        self._host_tokens.show(scheduler.num_host_tokens)
        running = counts["running"]
        self.load = Load(
            running=running,
            waiting=max(0, num_unfinished - running),
            free_pages=free,
            total_pages=total,
            pending_prefill_tokens=self._pending(counts) if self._role is Role.PREFILL else 0,
            speed=self._told_speed(turn, now_s),
        )
        if turn.plan is not None and turn.plan.decode:
            metrics.engine.dispatched_decode_steps.inc(turn.plan.num_steps)
        if turn.finished is not None:
            metrics.engine.step_seconds.labels(phase=_phase(turn.finished)).observe(turn.step_s)
        if scheduler.stats != self._seen:  # a tick that plans nothing may have looked a prompt up
            self._count()
        if self._kv_feed is not None:
            self._kv_feed.publish()

    def _pending(self, counts: dict[str, int]) -> int:
        self._pending_age += 1
        if self._pending_age <= (counts["waiting"] + counts["running"]) // SEQUENCES_PER_TICK:
            return self.load.pending_prefill_tokens
        self._pending_age = 0
        return self._scheduler.pending_prefill_tokens

    def _told_speed(self, turn: Turn, now_s: float) -> Speed | None:
        if self._speed is None:
            return None
        if turn.finished is not None and _phase(turn.finished) == "prefill":
            deepest = max(chunk.start for chunk in turn.finished.prefill)
            self._speed.add(turn.finished.num_tokens, turn.step_s, now_s, deepest=deepest)
        return self._speed.told(now_s)

    def _count(self) -> None:
        now, seen, metrics = self._scheduler.stats, self._seen, self._metrics
        metrics.engine.prefill_tokens.labels(role=self._role.value).inc(now.prefill_tokens - seen.prefill_tokens)
        metrics.cache.hit_tokens.inc(now.prefix_hit_tokens - seen.prefix_hit_tokens)
        metrics.cache.query_tokens.inc(now.prefix_query_tokens - seen.prefix_query_tokens)
        metrics.cache.refound_tokens.inc(now.refound_tokens - seen.refound_tokens)
        metrics.cache.forks.inc(now.forks - seen.forks)
        metrics.cache.host_tokens.labels(direction="out").inc(now.offloaded_tokens - seen.offloaded_tokens)
        metrics.cache.host_tokens.labels(direction="in").inc(now.restored_tokens - seen.restored_tokens)
        metrics.engine.preemptions.inc(now.preemptions - seen.preemptions)
        metrics.engine.retractions.inc(now.retractions - seen.retractions)
        self._seen = replace(now)


def _phase(plan: Plan) -> str:
    if plan.prefill:
        return "mixed" if plan.decode else "prefill"
    return "decode" if plan.decode else "upkeep"  # slots freed, nothing computed
