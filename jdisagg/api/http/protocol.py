"""What uvicorn's HTTP/1.1 protocol does not do: bounds on headers, on clients that stand still, and on who may hang up.

    connections beyond a share of this process's descriptors are refused, but for a probe's
    headers     end within HEADER_TIMEOUT_S, MAX_HEADERS and MAX_HEADER_BYTES; so do trailers
    answers     UNREAD_TIMEOUT_S without a byte taken, or for longer too few of them, and the connection ends
    pipelines   a client that goes away cancels the request that is answered, not only the last of those behind it;
                MOST_BEHIND wait at most, and those of a piece
    offers      of another protocol (h2c) are passed over

Rests on uvicorn's httptools protocol, private parts included; the tests that fail when those change are test_odd_http.py's.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jdisagg.api.http.crowd import CLOSE, Crowd, OperatorsOnly, Room
from jdisagg.api.http.errors import plain_error
from jdisagg.api.unread import SLOWEST_IN_ALL_BYTES_PER_S, UNREAD_TIMEOUT_S

HEADER_TIMEOUT_S = 30.0  # from connecting, or from the first byte behind an answered request, to the end of the headers
SPARE_TIMEOUT_S = 2.0  # instead, where connections are short
MAX_HEADERS = 200  # of one request, and again behind its chunks
MAX_HEADER_BYTES = 2**16  # of one request, its first line included, and again behind its chunks; what came in one piece with
# their end is not counted
MOST_BEHIND = 16  # requests that wait behind the one that is answered, before nothing more is parsed or read
PIECE_BYTES = 2**10  # parsed at once where there may be many requests: one of 18 bytes takes 20 us
_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class _TooManyHeaders(Exception):
    """Raised in a callback, to have the parser stop."""


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers another protocol (`Upgrade: h2c`, as Java's client does) as one that does not: the library
    leaves its body for that protocol."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._protocol = protocol

    @property
    def is_offered_another(self) -> bool:
        """The request whose headers were read last will come again, without the offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # what asyncio brings
        """Raises HttpParserError."""
        while True:
            try:
                return super().feed_data(data)
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _TooManyHeaders):
                    raise
                return self._protocol.refuse_headers()
            except httptools.HttpParserUpgrade as error:
                if not self.is_offered_another:
                    raise
                (num_read,) = error.args
                data = self._protocol.head_without_offer() + data[num_read:]


class _Flow(FlowControl):
    """Reads nothing more while requests that were read are not parsed, whoever asks for it."""

    is_behind = False

    def resume_reading(self) -> None:
        if not self.is_behind:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """One connection. uvicorn alone would keep the descriptors of clients that stand still, and headers without an end."""

    parser: _Parser
    flow: _Flow
    _answered: RequestResponseCycle | None = None
    _num_headers = 0  # since headers, or trailers, began
    _room = Room.PLENTY  # for it, when it came
    _have_begun = False  # headers, or a chunk, in the piece that is read
    _num_header_bytes: int | None = None  # in the pieces since the one in which headers, or a chunk, began; None: neither
    _header_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, crowd: Crowd, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._crowd = crowd
        self._unparsed = deque[bytes]()  # at most what came with one read

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._room = self._crowd.room(len(self.connections))
        if self._room is Room.NONE:
            _end_with(transport, self._crowd.refusal())
            return
        if self._room is Room.SPARE:
            self.app = OperatorsOnly(self.app, self._crowd)
        self.parser = _Parser(self)
        super().connection_made(transport)
        self.flow = _Flow(transport)  # type: ignore[assignment]
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._room is Room.NONE:
            return
        self._stop_waiting()
        self._stop_waiting_for_reader()
        self._unparsed.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._room is Room.NONE:
            return
        step = PIECE_BYTES if len(data) > PIECE_BYTES and _may_be_many(data) else len(data)
        self._unparsed += [data[begin : begin + step] for begin in range(0, len(data), step)]
        self._parse()

    def _parse(self) -> None:
        while self._unparsed and len(self.pipeline) < MOST_BEHIND:
            self._parse_piece(self._unparsed.popleft())
            if self.transport.is_closing():
                self._unparsed.clear()
        self.flow.is_behind = bool(self._unparsed)
        if self._unparsed:
            self.flow.pause_reading()

    def _parse_piece(self, data: bytes) -> None:
        self._have_begun = False
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._header_timer is None:  # the rest of a body that nobody wanted, or an empty line
            self._await_headers()
        if self._num_header_bytes is not None and not self._have_begun:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(_TOO_LARGE, f"the headers have more than {MAX_HEADER_BYTES} bytes; send shorter or fewer ones")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0
        self._begin_headers()
        self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise _TooManyHeaders
        super().on_header(name, value)

    def refuse_headers(self) -> None:
        """End the connection of a request with too many."""
        self._refuse(_TOO_LARGE, f"there are more than {MAX_HEADERS} headers; send fewer")

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP, as uvicorn calls it."""
        self._crowd.no_http(self.client)
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        _end_with(self.transport, plain_error(status, message))

    def on_headers_complete(self) -> None:
        if not self.parser.is_offered_another:
            self._stop_waiting()
            self._num_header_bytes, self._num_headers = None, 0
            super().on_headers_complete()
            if len(self.pipeline) < MOST_BEHIND:
                self.flow.resume_reading()  # else nobody would hear that the client goes away

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if not self.flow.write_paused:  # who asks again has taken what came before, or makes this answer wait later
            self._stop_waiting_for_reader()
        super()._start_asgi_task(cycle, app)

    def on_chunk_header(self) -> None:
        """Headers follow unless data does."""
        self._begin_headers()

    def _begin_headers(self) -> None:
        self._num_header_bytes, self._have_begun = 0, True

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = None
        if not self.parser.is_offered_another:
            super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """The head of the request whose headers were read last."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader_of_the_rest()
        if self.flow.is_behind:
            self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_to_await_reader()

    def resume_writing(self) -> None:
        self._stop_waiting_for_reader()
        super().resume_writing()
        self._await_reader_of_the_rest()

    def _await_reader_of_the_rest(self) -> None:
        """Closing waits for the end of a whole answer to be taken, however little it is, and nobody is to write any more."""
        if self._answered is not None and self._answered.response_complete and self.transport.get_write_buffer_size():
            self._begin_to_await_reader()

    def _begin_to_await_reader(self) -> None:
        self._stop_waiting_for_reader()
        unread_bytes = _unread_bytes(self.transport)
        self._await_reader(unread_bytes, self.loop.time() + UNREAD_TIMEOUT_S + unread_bytes / SLOWEST_IN_ALL_BYTES_PER_S)

    def _await_reader(self, unread_bytes: int, until_s: float) -> None:
        left_s = max(0.0, min(UNREAD_TIMEOUT_S, until_s - self.loop.time()))
        self._reader_timer = self.loop.call_later(left_s, self._reader_is_late, unread_bytes, until_s)

    def _reader_is_late(self, unread_bytes: int, until_s: float) -> None:
        self._reader_timer = None
        if not self.transport.get_write_buffer_size():
            return
        left_bytes = _unread_bytes(self.transport)
        if left_bytes < unread_bytes and self.loop.time() < until_s:
            self._await_reader(left_bytes, until_s)
        else:
            self.transport.abort()

    def _stop_waiting_for_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _await_headers(self) -> None:
        self._stop_waiting()
        timeout_s = SPARE_TIMEOUT_S if self._room is Room.SPARE else HEADER_TIMEOUT_S
        self._header_timer = self.loop.call_later(timeout_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:  # a pipelined request: while one waits behind the answer, nothing is read
            self._await_headers()
            return
        if self._room is Room.SPARE and self.cycle is None:
            _end_with(self.transport, self._crowd.refusal())
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _may_be_many(data: bytes) -> bool:
    """Whether it may hold more requests than may wait: each has two CR, which the parser insists on, and JSON has few."""
    at = -1  # `count` takes 30 times as long where there are none
    return all((at := data.find(b"\r", at + 1)) >= 0 for _ in range(2 * MOST_BEHIND))


def _end_with(transport: asyncio.WriteTransport, answer: Response) -> None:
    """What no application is asked about ends the connection with an error as the application's are."""
    head = [b"HTTP/1.1 %d %s" % (answer.status_code, HTTPStatus(answer.status_code).phrase.encode())]
    head += [b"%s: %s" % header for header in (*answer.raw_headers, CLOSE)]
    transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
    transport.close()


def _unread_bytes(transport: asyncio.WriteTransport) -> int:
    """What waits here for the client, and in the kernel, which asks for more only when a third of its megabytes is taken."""
    queued = b"\0" * 4
    with suppress(OSError):  # where it cannot tell
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + struct.unpack("i", queued)[0]
