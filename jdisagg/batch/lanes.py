"""Connections to one server, each with a client of its own.

In one client every request looks at every connection: a row costs 2 ms at 32 of them, 9 ms at 256.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from jdisagg.core.errors import ConfigError

_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1)
# The kernel asks the other one whether it is there still, in all for 90 s: nothing is said while an answer is computed, and a
# host without power never hangs up.
_ASKED_AFTER = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # some systems have not all of them


class Lanes(httpx.AsyncBaseTransport):
    """As many connections as requests are under way at once; the one that was used last is used next. Answers are read whole.
    Proxies and certificates come from the environment, as with any client."""

    def __init__(self) -> None:
        """Raises ConfigError for proxies that cannot be used."""
        self._certificates = httpx.create_ssl_context()  # read once
        self._all: list[httpx.AsyncClient] = []
        try:
            self._idle = [self._open()]
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # SOCKS, for which httpx needs another package, or no URL
            told = f"proxies of the environment: {error}; choose an HTTP one, or none with no_proxy='*'"
            raise ConfigError(told) from error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError."""
        lane = self._idle.pop() if self._idle else self._open()
        request.extensions = {**request.extensions, "trace": _ask_after}
        try:
            response = await lane.send(request, stream=True)
            try:
                raw = b"".join([part async for part in response.aiter_raw()])
            finally:
                await response.aclose()
        finally:
            self._idle.append(lane)
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(raw))

    async def aclose(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(lane.aclose() for lane in self._all))

    def _open(self) -> httpx.AsyncClient:
        lane = httpx.AsyncClient(verify=self._certificates, limits=_ONE)
        self._all.append(lane)
        return lane


async def _ask_after(event: str, told: Mapping[str, Any]) -> None:
    if event == "connection.connect_tcp.complete":
        connection: socket.socket = told["return_value"].get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ASKED_AFTER.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def proxy_of(url: str) -> str | None:
    """Host and port of the proxy of the environment through which `url` is asked, if any."""
    asked, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(asked.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(asked.netloc.rpartition("@")[2]):
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}").netloc.rpartition("@")[2]  # without its password
