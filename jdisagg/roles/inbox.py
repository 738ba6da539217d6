"""What reaches an engine thread, and the queue it arrives on.

Everything outside (gRPC and HTTP loop, transfer threads) talks to an engine by posting one of these; the engine thread is
the only reader. Posting never blocks and is thread-safe; an idle engine sleeps here.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jdisagg.core.requests import EngineRequest
from jdisagg.handoff.events import FromPrefill, PeerAlive, PeerMessage, PeerOpened
from jdisagg.roles.ports import OutputSink
from jdisagg.transfer.base import TransferEvent


@dataclass(frozen=True, slots=True)
class Submit:
    """Run `request`; its outputs go to `sink`, which also gets the error if it is not admitted. `front_end` sent it: only its
    own newer attempts take the place of a request."""

    request: EngineRequest
    sink: OutputSink
    front_end: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for `request_id`; unknown ids are ignored. `attempt` guards against a newer attempt of the same id,
    `sink` (that of its Submit, if given) against a request of that id from somebody else, who came first. `enough`: its client
    is not gone, but has all that it wanted."""

    request_id: str
    attempt: int
    sink: OutputSink | None = None
    enough: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` on the engine thread (debug state, drain, cache reset) and put its result into `future`."""

    function: Callable[[], Any]
    future: Future[Any]


Message = Submit | Cancel | Call | PeerOpened | PeerMessage | PeerAlive | FromPrefill | TransferEvent


class Inbox:
    """Many writers, one reader."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def post(self, message: Message) -> None:
        """Append and wake the reader."""
        self._queue.put(message)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have `function` run between two ticks; the future resolves with its result or its exception."""
        future: Future[Any] = Future()
        self.post(Call(function, future))
        return future

    def drain(self, wait_s: float) -> list[Message]:
        """Everything posted so far; when there is nothing, wait up to `wait_s` seconds for the first message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
