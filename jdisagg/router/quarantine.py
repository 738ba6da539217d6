"""Requests that seem to kill workers are refused for a while. Kept in memory: a restarted router starts with none."""

from __future__ import annotations

import hashlib
from array import array

from jdisagg.core.errors import Quarantined
from jdisagg.core.requests import EngineRequest


class Quarantine:
    """Requests, by id and by prompt, that are refused for now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s: dict[str, float] = {}  # by key, the first to end first

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Refuse it from now on."""
        self.expire(now_s)
        for key in _keys(request):
            self._until_s.pop(key, None)
            self._until_s[key] = now_s + self._seconds

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            del self._until_s[next(iter(self._until_s))]

    def check(self, request: EngineRequest, now_s: float) -> None:
        """Raises Quarantined while it is quarantined."""
        self.expire(now_s)
        left_s = max(self._until_s.get(key, 0.0) for key in _keys(request)) - now_s if self._until_s else 0.0
        if left_s > 0:
            raise Quarantined(
                f"request {request.request_id}: this request or its prompt was in flight when several workers died; "
                f"quarantined for {left_s:.0f} s more"
            )

    def __len__(self) -> int:
        return len(self._until_s)


def _keys(request: EngineRequest) -> tuple[str, str]:
    """Who keeps prefixes apart by a salt keeps prompts apart: nobody learns, or suffers from, what others asked."""
    prompt = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    prompt.update(request.cache_salt.encode())
    return f"id:{request.request_id}", f"prompt:{prompt.hexdigest()}"
