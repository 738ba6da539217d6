"""Attempt numbers of requests whose id comes again.

A client may use an id once more as soon as its request has ended for it. Its engine may not know of that end yet: what it still
says of the old request would be taken for the new one's, had both the same number.
"""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.latest import remember
from jdisagg.core.requests import EngineRequest

MOST_REMEMBERED = 4096  # ids; what a cancelled request still sends is under way for moments


class Attempts:
    """Of one front of an engine or fleet. Lives on one event loop."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # by request id, the latest to be left last

    def behind(self, request: EngineRequest) -> EngineRequest:
        """`request`, numbered behind everything of its id that may still be heard of."""
        last = self._last.get(request.request_id)
        return request if last is None or last < request.attempt else replace(request, attempt=last + 1)

    def left(self, request_id: str, attempt: int) -> None:
        """It is over here before its engine has said so: outputs of it may be on their way."""
        remember(self._last, request_id, attempt, MOST_REMEMBERED)
