"""An engine, real but for its device, stepped by hand: no thread, no clock, no array."""

from __future__ import annotations

from typing import Any

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.metrics import Metrics
from jdisagg.core.requests import Role
from jdisagg.roles.engine_loop import EngineLoop
from jdisagg.roles.engine_role import EngineRole
from jdisagg.roles.inbox import Inbox
from jdisagg.roles.observer import TickObserver
from jdisagg.roles.pipeline import StepPipeline
from jdisagg.roles.streams import Streams
from jdisagg.sched.scheduler import Scheduler
from tests.unit.roles.network_fake import FakeRunner
from tests.unit.sched.content_fake import EOS


class Engine:
    """One loop with its parts at hand."""

    def __init__(
        self,
        role: Role,
        num_pages: int,
        local_prefill: bool,
        *,
        page_size: int = 4,
        host_tokens: int = 0,
        caching: bool = True,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "reserved_decode_tokens": 4}
        config = SchedulerConfig(**(defaults | settings))
        self.metrics = Metrics()
        self.inbox = Inbox()
        self.streams = Streams()
        self.runner = FakeRunner(num_pages, page_size)
        self.scheduler = Scheduler(
            config, role=role, max_model_len=48, page_size=page_size, num_pages=num_pages, eos_token_ids=(EOS,),
            local_prefill=local_prefill, host_tokens=host_tokens, enable_prefix_caching=caching,
        )  # fmt: skip
        self.loop: EngineLoop | None = None
        self._role = role

    def run(self, role: EngineRole, **options: Any) -> None:
        """Complete the engine with its role."""
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            pipeline=StepPipeline(self.scheduler, self.runner, lambda *_: "nobody looked"),
            role=role,
            inbox=self.inbox,
            streams=self.streams,
            metrics=self.metrics,
            observer=TickObserver(self.scheduler, self.metrics, self._role),
            worker=self._role.value,
            **options,
        )

    def tick(self, now_s: float) -> bool:
        """One tick, invariants checked after it. What was free before is blank."""
        self.runner.device.pages.blank(self.scheduler._table.pages._allocator._free)
        assert self.loop is not None
        busy = self.loop.tick(now_s)
        self.scheduler.check()
        return busy
