"""Clients whose API key is missing or wrong: without a line in the log nobody but they would know, as when a key was exchanged
here and not there."""

from __future__ import annotations

import logging
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdisagg.core.logs import Seldom
from jdisagg.core.told import told

log = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0  # anybody who reaches the port can cause it
MOST_CHARACTERS = 100  # of a path
UNAUTHORIZED = 401


class WrongKeys:
    """Another application, whose answers of 401 are in the log: one line a minute, with the number of the others. Never the key
    that was sent: it may be a good one with a letter too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._seldom = Seldom(TOLD_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == UNAUTHORIZED:
                where, (host, *_) = told(scope["path"], MOST_CHARACTERS), scope.get("client") or ("?",)
                text = "a call of %s from %s was refused (401): missing or wrong API key"
                self._seldom.say(log, logging.WARNING, text, where, host, now_s=monotonic())
            await send(message)

        await self._app(scope, receive, telling)
