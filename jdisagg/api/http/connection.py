"""Work that lives exactly as long as its client's connection, and server-sent events on top of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jdisagg.api.generation.ends import Ends
from jdisagg.api.http.answer_json import encode_event
from jdisagg.api.http.errors import error_object
from jdisagg.api.http.request_id import logged_request_id
from jdisagg.api.tasks import cancel_and_wait
from jdisagg.core.errors import Cancelled, JdisaggError

T = TypeVar("T")
Event = dict[str, Any] | bytes  # or its JSON

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Run `work`; when the client disconnects first, cancel it, wait for its clean-up and raise Cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client disconnected")
    finally:
        await cancel_and_wait(working, watching)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one `data:` line per object, then `data: [DONE]`.

    `first` has been awaited by the caller, so that a request that fails before its first token gets a real status. A later
    failure is sent as an error object, which ends the stream without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, first: Event, rest: AsyncGenerator[Event], ends: Ends) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; closes the generator before it returns."""
        async with aclosing(self._rest):
            try:
                await while_connected(receive, self._send_all(send, logged_request_id(scope)))
            except (Cancelled, OSError):
                return  # nobody is there to be told; closing the generator frees the request

    async def _send_all(self, send: Send, request_id: str) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _send_event(send, self._first)
            async for event in self._rest:
                await _send_event(send, event)
        except JdisaggError as error:
            await _send_event(send, error_object(error))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # a bug of ours: the client is told that its answer is not whole
            self._ends.failed(error)
            self._ends.tell("request %s: its stream failed", request_id, error)
            await _send_event(send, error_object(JdisaggError("internal error; the server's log has the details")))
        else:
            await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(request: Request, events: AsyncGenerator[Event], ends: Ends) -> EventStream:
    """Wait for the first event (or the client's going away) and return the response, which tells `ends` of a bug in the others.
    Raises what the first event raises."""
    try:
        first = await while_connected(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, ends)


async def _send_event(send: Send, event: Event) -> None:
    """Takes as long as the client does; `server` hangs up on one that takes nothing."""
    data = event if isinstance(event, bytes) else encode_event(event)
    await send({"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": True})
