"""One tick of an engine, the same for every role. Runs on the engine thread, which owns everything reachable from here.

    tick:  drain inbox -> admit / cancel / peer events -> poll hand-offs -> expire deadlines
           -> plan + dispatch step N+1 -> read + commit step N -> deliver outputs

It blocks for two things: an idle engine sleeps on its inbox, a busy one waits for the previous step (and for KV: of a request
that fails for infinity or NaN, to say where, and of a long sequence whose pages are taken, on its way to host memory). While a
step computes prompts, peers and transfer threads are heard: a chunk's KV is announced when it is there, not when the next chunk
is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from jdisagg.core.errors import NumericalError, RequestError, Unavailable
from jdisagg.core.fleet import Load
from jdisagg.core.logs import Seldom
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Provenance
from jdisagg.core.timeline import Timeline
from jdisagg.roles.engine_role import EngineRole
from jdisagg.roles.idle_check import IdleCheck
from jdisagg.roles.inbox import Call, Cancel, Inbox, Message, Submit
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.ports import OutputSink
from jdisagg.roles.stages import Stage, StageClock
from jdisagg.roles.streams import Stream, Streams
from jdisagg.sched import log_codec
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # longest sleep of an idle engine: deadlines, leases and the health clock are looked at this often
LISTEN_S = 0.001  # longest sleep of one that waits for a step and listens: the step's end is seen this late
NAN_EVERY_S, NAN_FIRST = 10.0, 16  # that are told: a bad device, or bad weights, fail all


class EngineLoop:
    """Composition of scheduler, pipeline, streams and one role."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        role: EngineRole,
        inbox: Inbox,
        streams: Streams,
        metrics: Metrics,
        observer: TickObserver,
        worker: str,
        slow_request_s: float = inf,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`slow_request_s`: requests that take longer are logged with their life. `clock` measures the stages of a tick
        and what passes within one."""
        self.inbox = inbox
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._role = role
        self._streams = streams
        self.metrics = metrics
        self._observer = observer
        self._worker = worker
        self._slow_request_s = slow_request_s
        self._clock = clock
        self._stages = StageClock(metrics, clock)
        self._was_idle = False
        self._idle_check = IdleCheck()
        self._told_nan = Seldom(NAN_EVERY_S, NAN_FIRST)
        self._kept = deque[Message]()  # not handled yet; what comes during a step keeps until the next tick

    def tick(self, now_s: float) -> bool:
        """Advance by one step; returns False when there was nothing to do. Raises only what must stop the process."""
        stages, began_s = self._stages, self._clock()
        stages.start()
        self._kept += self.inbox.drain(IDLE_WAIT_S if self._was_idle else 0.0)
        if self._was_idle:  # what woke it came now, not when it fell asleep
            woke_s = self._clock()
            now_s, began_s = now_s + woke_s - began_s, woke_s
        stages.lap(Stage.IDLE if self._was_idle else Stage.INBOX)
        outputs, had_messages = list[Output](), bool(self._kept)
        while self._kept:
            self._take(self._kept[0], outputs, now_s)
            self._kept.popleft()  # one that was not survived is still there for `fail_all`
        stages.lap(Stage.INBOX)
        outputs += self._role.before_step(now_s)
        stages.lap(Stage.PEERS)
        expired = self._scheduler.expire(now_s)
        turn = self._pipeline.turn(now_s, stages, lambda: self._listen(outputs, now_s + self._clock() - began_s))
        ended_s = now_s + turn.host_s + turn.waited_s
        self._tell_nan(turn.outputs, ended_s)
        outputs += self._role.after_step(turn.plan, expired + turn.outputs, ended_s)
        stages.lap(Stage.PEERS)
        self._mark(turn.plan, now_s)
        self._observer.observe(turn, self.num_unfinished, ended_s)
        self._deliver(outputs, ended_s)
        idle = turn.idle and not had_messages
        is_empty = turn.idle and self._scheduler.is_idle() and self._role.is_idle
        if self._idle_check.is_due(now_s, is_idle=is_empty):
            self._scheduler.check()
        self._was_idle = idle
        stages.lap(Stage.DELIVER)
        stages.end(dispatched=turn.plan is not None)
        return not idle

    def _listen(self, outputs: list[Output], now_s: float) -> None:
        """Hear peers and transfer threads while a step runs; requests, cancels and calls keep."""
        messages = self.inbox.drain(LISTEN_S)
        self._kept += [message for message in messages if isinstance(message, Submit | Cancel | Call)]
        for message in messages:
            if not isinstance(message, Submit | Cancel | Call):
                outputs += self._role.handle(message, now_s)

    def _tell_nan(self, outputs: list[Output], now_s: float) -> None:
        """What this device computed to no use: else the client alone would know of it, wherever it failed."""
        for output in outputs:
            if isinstance(output.error, NumericalError):
                self.metrics.engine.nan_requests.inc()
                self._told_nan.say(log, logging.ERROR, "%s", output.error.message, now_s=now_s)

    def _mark(self, plan: Plan | None, now_s: float) -> None:
        """Tell the requests' records what the step just planned does to them."""
        for lost in self._scheduler.preempted:
            if record := self._streams.record(lost.request_id):
                record.preempted(now_s)
        for admit in plan.admit if plan is not None else ():
            if record := self._streams.record(admit.request_id):
                record.scheduled(now_s)

    def _take(self, message: Message, outputs: list[Output], now_s: float) -> None:
        """Handle one message; `outputs` are those of this tick so far."""
        match message:
            case Submit():
                self._admit(message, outputs, now_s)
            case Cancel(request_id=request_id, attempt=attempt, sink=sink, enough=enough):
                stream = self._streams.get(request_id)
                if stream is not None and stream.request.attempt == attempt and (sink is None or stream.sink == sink):
                    self._cancel(stream, outputs, now_s, enough=enough)
            case Call(function=function, future=future):
                if not future.set_running_or_notify_cancel():
                    return  # whoever asked no longer waits
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - the caller's future carries it
                    future.set_exception(error)
            case _:
                outputs += self._role.handle(message, now_s)

    def _admit(self, message: Submit, outputs: list[Output], now_s: float) -> None:
        request = message.request
        try:
            if (older := self._streams.get(request.request_id)) is not None:
                if older.front_end != message.front_end or older.request.attempt >= request.attempt:
                    taken = f"request id {request.request_id!r} is running here already"
                    # no InvalidRequest: its router may have died, and the client asks another: after a lease it has ended
                    raise Unavailable(f"{taken}; use a new id, or ask again when it has ended")
                # Its router replays it here and the cancel of the older attempt, on a broken stream, is still under way.
                self._cancel(older, outputs, now_s)
            self._role.admit(request, now_s)
        except RequestError as error:
            self.metrics.requests.finished.labels(reason="refused").inc()
            message.sink([_failure(request.request_id, request.attempt, error)])
            return
        timeline = Timeline(self.metrics, request, now_s, self._slow_request_s)
        self._streams.open(request, message.sink, timeline, message.front_end)

    def _cancel(self, stream: Stream, outputs: list[Output], now_s: float, *, enough: bool = False) -> None:
        """Nothing of it is delivered any more, not even to a new request of the same id that comes in this very tick."""
        request_id = stream.request.request_id
        self._streams.close(request_id)
        (stream.timeline.stopped if enough else stream.timeline.aborted)(now_s)
        self._scheduler.cancel(request_id)
        self._role.forget(request_id)
        outputs[:] = [output for output in outputs if output.request_id != request_id]

    def _deliver(self, outputs: list[Output], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._role.forget(output.request_id)
        named = [self._named(output) for output in outputs]
        self._streams.deliver(named, now_s)

    def _named(self, output: Output) -> Output:
        """A request's first and last output say which worker it came from, and how many prompt tokens were computed for it
        anywhere: of an answer that the edge ends, at a stop string, there is no last one."""
        stream = self._streams.get(output.request_id)
        is_known = stream is None or stream.is_named
        if output.finish is None and output.provenance is None and is_known:
            return output
        if stream is not None:
            stream.is_named = True
        provenance = replace(output.provenance or Provenance(), decode_worker=self._worker)
        if stream is not None and output.finish is not FinishReason.ERROR and not provenance.prefilled_tokens:
            computed = len(stream.request.prompt_token_ids) - output.cached_tokens
            provenance = replace(provenance, prefilled_tokens=computed)
        return replace(output, provenance=provenance)

    def start_draining(self) -> None:
        """Admit nothing any more, from clients or from other workers; what runs goes on."""
        self._scheduler.drain()

    @property
    def load(self) -> Load:
        """How busy the engine is; safe to read from any thread."""
        return self._observer.load

    @property
    def num_unfinished(self) -> int:
        """Requests of clients and of other workers that are still running; safe to read from any thread."""
        return len(self._streams) + self._role.num_guests

    def fail_all(self, error: RequestError) -> None:
        """The engine cannot go on: tell every client, of requests not admitted yet as well, without touching the device."""
        for request_id, stream in self._streams.items():
            self._streams.close(request_id)
            stream.sink([_failure(request_id, stream.request.attempt, error)])
        messages = [*self._kept, *self.inbox.drain(0.0)]
        self._kept.clear()
        for message in messages:
            if isinstance(message, Submit):
                message.sink([_failure(message.request.request_id, message.request.attempt, error)])

    def self_test(self, request: EngineRequest, sink: OutputSink, now_s: float) -> None:
        """Run one request through the real loop without needing a peer (readiness)."""
        self._role.start_self_test(request, now_s)
        self._streams.open(request, sink, Timeline(Metrics(), request, now_s))  # its life counts nowhere, its steps do

    def in_flight_text(self) -> str:
        """The plan the device works on, for the log; safe to call from another thread."""
        return repr(self._pipeline.in_flight)

    def snapshot(self) -> dict[str, Any]:
        """Queues, ledgers and streams as JSON-able data."""
        plan, scheduler, streams = self._pipeline.in_flight, self._scheduler.snapshot(), dict(self._streams.items())
        return {
            "worker": self._worker,
            "draining": scheduler["draining"],
            "streams": list(streams),
            "requests": {name: stream.timeline.record.snapshot() for name, stream in streams.items()},
            "scheduler": scheduler,
            "handoff": self._role.snapshot(),
            "in_flight": log_codec.encode(plan) if plan else None,
        }


def _failure(request_id: str, attempt: int, error: RequestError) -> Output:
    return Output(request_id=request_id, attempt=attempt, finish=FinishReason.ERROR, error=error)
