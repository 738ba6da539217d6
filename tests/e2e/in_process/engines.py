"""Real engines in this process, stepped by the test: real model, runner, scheduler, loop, and for a pair real hand-offs.

One compiled runner serves many engines: a scheduler may use fewer pages than the runner's pool has.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.config import LocalPrefill, SchedulerConfig, TransferConfig
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, Output, Role, TokenLogprob
from jdisagg.engine.runner import ModelRunner
from jdisagg.handoff.borrower import Borrower
from jdisagg.handoff.decode_side import DecodeSide
from jdisagg.handoff.lender import Lender
from jdisagg.handoff.messages import Lending
from jdisagg.handoff.prefill_side import PrefillSide
from jdisagg.roles.decode import DecodeRole
from jdisagg.roles.engine_loop import EngineLoop
from jdisagg.roles.engine_role import EngineRole
from jdisagg.roles.in_process import InProcessPeers
from jdisagg.roles.inbox import Inbox, Submit
from jdisagg.roles.kv_borrowing import KVBorrowing
from jdisagg.roles.kv_lending import KVLending
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import StepPipeline, Turn
from jdisagg.roles.prefill import PrefillRole
from jdisagg.roles.stages import StageClock
from jdisagg.roles.streams import Streams
from jdisagg.roles.unified import UnifiedRole
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler
from jdisagg.transfer.choice import PublisherSet
from jdisagg.transfer.device_put import DevicePutPublisher, device_put_fetcher
from jdisagg.transfer.target import PieceTarget
from tests.e2e.in_process.runners import BUDGET, MAX_LEN, POOL, SLOTS

TIME_LIMIT_S = 180.0


@dataclass
class Stream:
    """All that one request got, in order."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0

    def take(self, output: Output) -> None:
        """One output; nothing may follow the last."""
        assert output.error is None, f"{output.request_id}: {output.error}"
        assert self.finish is None, f"{output.request_id} got something after its end"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.finish, self.stop_token_id, self.cached_tokens = output.finish, output.stop_token_id, output.cached_tokens

    @property
    def essence(self) -> tuple[object, ...]:
        """What must be equal, floats to the last bit."""
        return self.tokens, self.finish, self.stop_token_id, self.logprobs, self.prompt_logprobs


class CountedRunner:
    """A runner that shows every plan to `count` before it goes to the device."""

    def __init__(self, runner: ModelRunner, count: Callable[[Plan], None]) -> None:
        self._runner = runner
        self._count = count
        self.collect = runner.collect
        self.is_done = runner.is_done
        self.export_tokens = runner.export_tokens
        self.import_tokens = runner.import_tokens

    def dispatch(self, plan: Plan) -> Any:
        """As ModelRunner.dispatch."""
        self._count(plan)
        return self._runner.dispatch(plan)


class CountingPipeline(StepPipeline):
    """Counts what plans hold. `overlap` False: every step is committed before the next is planned."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlap: bool, margin: float) -> None:
        counted = CountedRunner(runner, self._count)
        super().__init__(scheduler, counted, lambda *_: "nobody looked")
        self._parts = scheduler, counted
        self._overlap = overlap
        self._margin_pages = margin * scheduler.num_pages
        self.counts: Counter[str] = Counter()
        self.arrivals: dict[str, int] = {}  # by request id
        self._latest = -1

    def turn(self, now_s: float, stages: StageClock, listen: Callable[[], None] = lambda: None) -> Turn:
        """As StepPipeline.turn, or in lockstep."""
        if self._overlap:
            self.counts["overlapped"] += self.in_flight is not None
            return super().turn(now_s, stages, listen)
        scheduler, runner = self._parts
        plan = scheduler.schedule(now_s)
        if plan.is_empty:
            return Turn(None, [], 0.0, 0.0)
        return Turn(plan, scheduler.commit(runner.collect(runner.dispatch(plan))), 0.0, 0.0, finished=plan)

    def _count(self, plan: Plan) -> None:
        counts, scheduler = self.counts, self._parts[0]
        counts["steps"] += 1
        counts["multi_step"] += plan.num_steps > 1
        counts["offloads"] += len(plan.offload)
        counts["restores"] += len(plan.restore)
        counts["page_copies"] += len(plan.copies)
        counts["chunks"] += len(plan.prefill)
        counts["parts"] += sum(not chunk.samples for chunk in plan.prefill)
        counts["longest_chunk"] = max([counts["longest_chunk"], *(len(chunk.token_ids) for chunk in plan.prefill)])
        counts["steps_below_margin"] += scheduler.num_free_pages < self._margin_pages
        for number in (self.arrivals[admit.request_id] for admit in plan.admit if admit.request_id in self.arrivals):
            counts["admitted_out_of_order"] += number < self._latest
            self._latest = max(self._latest, number)
        running = [s for s in scheduler.snapshot()["sequences"] if s["slot"] is not None]
        rows = {*plan.decode, *(chunk.slot for chunk in plan.prefill)}
        counts["most_reads"] = max(counts["most_reads"], sum(s["scheduled_tokens"] for s in running if s["slot"] in rows))
        counts["prompts_alone"] += bool(plan.prefill) and not plan.decode and len(running) > len(rows) + 1


class Engine:
    """One loop with its parts at hand; `config` are SchedulerConfig's fields."""

    def __init__(
        self,
        runner: ModelRunner,
        role: Role = Role.UNIFIED,
        *,
        num_pages: int = POOL,
        overlap: bool = True,
        caching: bool = False,
        local_prefill: bool = True,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": SLOTS, "max_num_batched_tokens": BUDGET, "reserved_decode_tokens": 0}
        scheduling = SchedulerConfig(**defaults | config)
        self.runner = runner
        self.role = role
        self.metrics = Metrics()
        self.inbox = Inbox()
        self.streams = Streams()
        self.scheduler = Scheduler(
            scheduling,
            role=role,
            max_model_len=MAX_LEN,
            page_size=runner.page_size,
            num_pages=num_pages,
            eos_token_ids=(0,),
            enable_prefix_caching=caching,
            local_prefill=local_prefill,
            host_tokens=scheduling.host_kv_bytes // runner.device.layout.spec.bytes_per_token,
        )
        self.pipeline = CountingPipeline(self.scheduler, runner, overlap=overlap, margin=scheduling.safety_margin)
        self.peak_pages = 0
        self.loop = self.complete(UnifiedRole(self.scheduler))

    def complete(self, role: EngineRole) -> EngineLoop:
        """Run this role from now on."""
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            pipeline=self.pipeline,
            role=role,
            inbox=self.inbox,
            streams=self.streams,
            metrics=self.metrics,
            observer=TickObserver(self.scheduler, self.metrics, self.role),
            worker=self.role.value,
        )
        return self.loop

    def tick(self, now_s: float) -> bool:
        """False when there was nothing to do."""
        busy = self.loop.tick(now_s)
        self.peak_pages = max(self.peak_pages, self.scheduler.num_pages - self.scheduler.num_free_pages)
        return busy

    def counters(self) -> dict[str, int]:
        """What happened so far; those that are 0 are left out."""
        stats = self.scheduler.stats
        names = (
            "preemptions",
            "retractions",
            "offloaded_tokens",
            "restored_tokens",
            "forks",
            "prefix_hit_tokens",
            "refound_tokens",
        )
        counted = {name: getattr(stats, name) for name in names} | dict(self.pipeline.counts)
        return {name: count for name, count in counted.items() if count}

    def serve(self, requests: Iterable[EngineRequest], *, per_tick: float = 2) -> dict[str, Stream]:
        """Run all, `per_tick` of them coming with every tick (less than 1: one every few ticks)."""
        return serve(self, (self,), requests, per_tick)

    def assert_quiescent(self) -> None:
        """Nothing is left."""
        assert self.scheduler.is_idle(), self.scheduler.snapshot()
        self.scheduler.check()
        assert self.scheduler.num_free_pages == self.scheduler.num_pages
        assert len(self.runner._host) == 0
        assert len(self.streams) == 0


class EnginePair:
    """P and D on devices of their own; `prefill` and `decode` are options of their engines."""

    def __init__(
        self,
        runners: tuple[ModelRunner, ModelRunner],
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        local_prefill: LocalPrefill = LocalPrefill.NEVER,
        want_min_tokens: int = 0,
    ) -> None:
        """`want_min_tokens` 0: P fetches nothing from D."""
        configs = [TransferConfig(transfer_chunk_tokens=r.chunk_tokens, local_prefill=local_prefill) for r in runners]
        sent, kept = (runner.device.layout.spec for runner in runners)
        self.prefill = Engine(runners[0], Role.PREFILL, **prefill or {})
        local = local_prefill is not LocalPrefill.NEVER
        self.decode = Engine(runners[1], Role.DECODE, local_prefill=local, **decode or {})
        self._publisher = DevicePutPublisher(self.prefill.inbox.post)
        target = PieceTarget.of(kept, runners[1].device.piece_sharding, runners[1].chunk_tokens)
        self._fetcher = device_put_fetcher(self._publisher, target, self.decode.inbox.post, runners[0].device.empty_piece())
        lent = DevicePutPublisher(self.decode.inbox.post)
        to_prefill = PieceTarget.of(sent, runners[0].device.piece_sharding, runners[0].chunk_tokens)
        borrowed = device_put_fetcher(lent, to_prefill, self.prefill.inbox.post, runners[1].device.empty_piece())
        borrowing = KVBorrowing(
            Borrower(configs[0], bytes_per_token=sent.bytes_per_token),
            min_tokens=want_min_tokens,
            page_size=runners[0].page_size,
            dtype=sent.dtype,
            scheduler=self.prefill.scheduler,
            runner=runners[0],
            fetcher=borrowed,
            metrics=self.prefill.metrics,
        )
        lending = KVLending(
            Lender(configs[1], bytes_per_token=kept.bytes_per_token),
            Lending(address=InProcessPeers.ADDRESS, backend=lent.name, dtype=kept.dtype),
            scheduler=self.decode.scheduler,
            runner=runners[1],
            publisher=lent,
            metrics=self.decode.metrics,
        )
        self._closers = [lent.close, borrowed.close]
        self.prefill.complete(
            PrefillRole(
                scheduler=self.prefill.scheduler,
                handoffs=PrefillSide(configs[0], bytes_per_token=sent.bytes_per_token),
                runner=runners[0],
                publishers=PublisherSet([self._publisher]),
                metrics=self.prefill.metrics,
                worker="prefill",
                borrowing=borrowing,
            )
        )
        self.decode.complete(
            DecodeRole(
                config=configs[1],
                scheduler=self.decode.scheduler,
                handoffs=DecodeSide(
                    configs[1], chunk_bytes_per_token=kept.most_bytes_per_token, backend="device_put", eos_token_ids=(0,)
                ),
                runner=runners[1],
                peers=InProcessPeers(self.prefill.inbox, self.decode.inbox),
                fetcher=self._fetcher,
                streams=self.decode.streams,
                metrics=self.decode.metrics,
                known_peers=lambda is_shunned: (InProcessPeers.ADDRESS,),
                page_size=runners[1].page_size,
                lending=lending,
            )
        )

    def serve(self, requests: Iterable[EngineRequest], *, per_tick: float = 2) -> dict[str, Stream]:
        """Run all on D; both engines end quiescent."""
        return serve(self.decode, (self.prefill, self.decode), requests, per_tick)

    def close(self) -> None:
        """End the transfer threads."""
        for close in (self._publisher.close, self._fetcher.close, *self._closers):
            close()


def serve(front: Engine, engines: tuple[Engine, ...], requests: Iterable[EngineRequest], per_tick: float) -> dict[str, Stream]:
    """Give `requests` to `front` and step `engines` until all have ended."""
    waiting = deque(requests)
    streams = {request.request_id: Stream() for request in waiting}

    def sink(outputs: list[Output]) -> None:
        for output in outputs:
            streams[output.request_id].take(output)

    idle_ticks, due, gives_up_s = 0, 0.0, time.monotonic() + TIME_LIMIT_S
    while waiting or idle_ticks < 3 or any(not engine.scheduler.is_idle() for engine in engines):
        due += per_tick
        while due >= 1 and waiting:
            due -= 1
            request = waiting.popleft()
            front.pipeline.arrivals[request.request_id] = len(front.pipeline.arrivals)
            front.inbox.post(Submit(request, sink))
        now_s = time.monotonic()
        busy = [engine.tick(now_s) for engine in engines]
        idle_ticks = 0 if any(busy) else idle_ticks + 1
        if not any(busy):
            time.sleep(0.0005)  # a transfer thread is at work
        assert now_s < gives_up_s, [engine.loop.snapshot() for engine in engines]
    for engine in engines:
        engine.assert_quiescent()
    assert all(stream.finish is not None for stream in streams.values())
    return streams
