"""How many HTTP connections a process keeps: a share of its descriptors, so that links to workers and routers find theirs."""

from __future__ import annotations

import logging
from time import monotonic

from jdisagg.api.listening import SHARE, most_connections
from jdisagg.core.logs import Seldom

log = logging.getLogger(__name__)

TOLD_EVERY_S = 10.0
_BODY = b'{"error":{"message":"too many connections; try again later","type":"overloaded","param":null,"code":null}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Crowd:
    """Of one server. Lives on its event loop."""

    def __init__(self) -> None:
        self._seldom = Seldom(TOLD_EVERY_S)

    def has_room(self, num_open: int) -> bool:
        """Whether one more may stay beside `num_open`; the log says when not."""
        most = most_connections()
        if most is None or num_open < most:
            return True
        text = "%d HTTP connections are open, as many as %.0f%% of this process's descriptors: others are refused"
        self._seldom.say(log, logging.WARNING, text, num_open, 100 * SHARE, now_s=monotonic())
        return False
