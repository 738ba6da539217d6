"""Two brakes on replay: requests that seem to kill workers, and a fleet-wide budget of replays."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from jdisagg.core.errors import HandoffLost
from jdisagg.core.requests import EngineRequest


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How much recovery a fleet affords."""

    max_deaths: int = 2  # a request in flight at this many worker deaths is failed and refused for a while
    max_refusals: int = 8  # replays after a worker gave the request back (HandoffLost, Unavailable)
    quarantine_s: float = 60.0
    budget: int = 1024  # replays at once
    budget_per_s: float = 32.0
    place_wait_s: float = 5.0  # how long a new request waits for a worker to appear
    replay_wait_s: float = 30.0  # how long a replay waits for one: its client already holds an open stream


class Quarantine:
    """Requests, by id and by prompt, that are refused for now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s: dict[str, float] = {}

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Refuse it from now on."""
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}
        for key in _keys(request):
            self._until_s[key] = now_s + self._seconds

    def check(self, request: EngineRequest, now_s: float) -> None:
        """Raises HandoffLost while it is quarantined."""
        left_s = max((self._until_s.get(key, 0.0) for key in _keys(request)), default=0.0) - now_s if self._until_s else 0.0
        if left_s > 0:
            raise HandoffLost(
                f"request {request.request_id}: this request or its prompt was in flight when several workers died; "
                f"quarantined for {left_s:.0f} s more"
            )

    def __len__(self) -> int:
        return len(self._until_s)


class ReplayBudget:
    """A token bucket: bursts up to `capacity`, then `per_s`."""

    def __init__(self, capacity: int, per_s: float) -> None:
        self._capacity = float(capacity)
        self._per_s = per_s
        self._left = float(capacity)
        self._refilled_s = 0.0

    def take(self, now_s: float) -> bool:
        """Whether one more replay is allowed now."""
        self._left = min(self._capacity, self._left + max(0.0, now_s - self._refilled_s) * self._per_s)
        self._refilled_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _keys(request: EngineRequest) -> tuple[str, str]:
    prompt = array("q", request.prompt_token_ids).tobytes()
    return f"id:{request.request_id}", f"prompt:{hashlib.blake2b(prompt, digest_size=16).hexdigest()}"
