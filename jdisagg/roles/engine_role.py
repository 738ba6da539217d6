"""What differs between the roles, as one Protocol: how requests come in, and what happens around each step.

`EngineLoop` is the same for every role; an EngineRole decides whether a request is computed here (unified), handed to P
(decode) or came from D (prefill).
"""

from __future__ import annotations

from typing import Any, Protocol

from jdisagg.core.requests import EngineRequest, Output
from jdisagg.roles.inbox import Message
from jdisagg.sched.plan import Plan


class EngineRole(Protocol):
    """One role's part of a tick; called by the engine thread only."""

    def admit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a client's request. Raises RequestError when it cannot be served."""
        ...

    def handle(self, message: Message, now_s: float) -> list[Output]:
        """Take a peer or transfer message."""
        ...

    def before_step(self, now_s: float) -> list[Output]:
        """Poll hand-offs: deadlines, leases."""
        ...

    def after_step(self, plan: Plan | None, outputs: list[Output], now_s: float) -> list[Output]:
        """`plan` was just dispatched, `outputs` were just committed; asks who got pages and who lost them. Returns the outputs
        for clients."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was cancelled: release its hand-off. Idempotent."""
        ...

    def start_self_test(self, request: EngineRequest, now_s: float) -> None:
        """Admit a request that exercises the real loop without a peer."""
        ...

    @property
    def is_idle(self) -> bool:
        """No hand-off is alive."""
        ...

    @property
    def num_guests(self) -> int:
        """Requests of other workers that are served here; safe to read from any thread."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Ledgers for /debug/state."""
        ...
