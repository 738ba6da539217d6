"""How many HTTP connections a process keeps: a share of its descriptors, so that links to workers and routers find theirs.

Beyond it there are a few spare ones, for one request of an operator each: a process whose clients have left connections open is
not restarted for that by its liveness probe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from time import monotonic

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.api.http.errors import error_response
from jdisagg.api.http.operations import PATHS
from jdisagg.api.listening import SHARE, most_connections
from jdisagg.core.errors import Unavailable
from jdisagg.core.logs import Seldom

log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0
MOST_SPARE = 64
SPARE_SHARE = 1 / 12  # of those that are kept
REFUSAL = error_response(Unavailable("too many connections; try again later"))
CLOSE = (b"connection", b"close")


class Room(Enum):
    """What there is for one more connection."""

    PLENTY = auto()
    SPARE = auto()  # see OperatorsOnly
    NONE = auto()


class Crowd:
    """Of one server. Lives on its event loop."""

    def __init__(self, on_refused: Callable[[], object]) -> None:
        """`on_refused`: called for each connection that is."""
        self._on_refused = on_refused
        self._seldom = Seldom(TOLD_EVERY_S)
        self._seldom_no_http = Seldom(TOLD_EVERY_S)

    def room(self, num_open: int) -> Room:
        """For one more beside `num_open`; the log says when it is short."""
        most = most_connections()
        if most is None or num_open < most:
            return Room.PLENTY
        text = (
            "%d HTTP connections are open, as many as %.0f%% of this process's descriptors: others are refused, but for probes"
        )
        self._seldom.say(log, logging.WARNING, text, num_open, 100 * SHARE, now_s=monotonic())
        return Room.SPARE if num_open < most + min(MOST_SPARE, max(1, round(SPARE_SHARE * most))) else Room.NONE

    def no_http(self, client: tuple[str, int] | None) -> None:
        """Came from there. Said now and then."""
        text = "what came on --port from %s is no HTTP, and was refused; gRPC, that of workers too, goes to --grpc-port"
        self._seldom_no_http.say(log, logging.WARNING, text, client[0] if client else "a socket", now_s=monotonic())

    def refusal(self) -> Response:
        """For a connection that is refused."""
        self._on_refused()
        return REFUSAL


class OperatorsOnly:
    """What a spare connection is served: one request, of Operations."""

    def __init__(self, app: ASGIApp, crowd: Crowd) -> None:
        self._app = app
        self._crowd = crowd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and have the connection closed."""
        app = self._app if scope["path"] in PATHS else self._crowd.refusal()
        await app(scope, receive, partial(_send_last, send))


async def _send_last(send: Send, message: Message) -> None:
    await send({**message, "headers": [*message["headers"], CLOSE]} if "headers" in message else message)
