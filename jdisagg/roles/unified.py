"""The unified role: every request is prefilled and decoded here. The baseline and the reference."""

from __future__ import annotations

from typing import Any

from jdisagg.core.requests import EngineRequest, Output
from jdisagg.roles.inbox import Message
from jdisagg.sched.plan import Plan
from jdisagg.sched.scheduler import Scheduler


class UnifiedRole:
    """No hand-off at all."""

    is_idle = True
    num_guests = 0  # everything here is a client's

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def admit(self, request: EngineRequest, now_s: float) -> None:
        """Queue it for prefill."""
        self._scheduler.add(request, now_s)

    def start_self_test(self, request: EngineRequest, now_s: float) -> None:
        """The ordinary path is the test."""
        self.admit(request, now_s)

    def handle(self, message: Message, now_s: float) -> list[Output]:
        """No peers: anything else than a client's message is our bug."""
        raise AssertionError(f"a unified engine got {type(message).__name__}")

    def before_step(self, now_s: float) -> list[Output]:
        """Nothing to poll."""
        return []

    def after_step(self, plan: Plan | None, outputs: list[Output], now_s: float) -> list[Output]:
        """Outputs go to the clients as they are."""
        return outputs

    def forget(self, request_id: str) -> None:
        """Nothing held outside the scheduler."""

    def snapshot(self) -> dict[str, Any]:
        """Nothing to show."""
        return {}
