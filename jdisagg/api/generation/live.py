"""The requests of an Edge by their ids, which are taken while a prompt is read and while its answer is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jdisagg.api.generation.choice import Delta
from jdisagg.api.mailbox import Mailbox
from jdisagg.core.errors import InvalidRequest


class Abort:
    """Put into a request's mailbox to end it."""


class RequestMailbox(Mailbox[Delta | Exception | Abort]):
    """What the reader of one request is told, by a task for each of its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: Sequence[asyncio.Task[None]] = ()
        self._is_aborted = False

    def abort(self) -> None:
        """The choices end now, whenever it is read. What a task had gathered it puts behind the Abort, unless it is cancelled
        once more. Idempotent."""
        if not self._is_aborted:
            self._is_aborted = True
            self.put(Abort())
            for task in self.tasks:
                task.cancel()


class LiveRequests(dict[str, RequestMailbox]):
    """What each of them is told. On the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._num_admitting = 0

    @property
    def num_streamed(self) -> int:
        """Those whose prompts have been read."""
        return len(self) - self._num_admitting

    def enter(self, request_id: str) -> RequestMailbox:
        """The id is taken from now on, until whoever called removes it. Raises InvalidRequest when it is."""
        if request_id in self:
            raise InvalidRequest(f"request_id {request_id!r} is still running; choose another", field="request_id")
        mailbox = self[request_id] = RequestMailbox()
        return mailbox

    @contextmanager
    def admitting(self, request_id: str) -> Iterator[RequestMailbox]:
        """The same while its prompt is read."""
        mailbox = self.enter(request_id)
        self._num_admitting += 1
        try:
            yield mailbox
        finally:
            self._num_admitting -= 1
            del self[request_id]
