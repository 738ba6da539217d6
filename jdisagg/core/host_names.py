"""Addresses of hosts, without waiting longer than the caller has: `socket.getaddrinfo` waits for a resolver that does not
answer for tens of seconds, and nothing ends it.
"""

from __future__ import annotations

import errno
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from typing import Any

REMEMBER_S = 10.0
NO_WAY = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM))  # to an address: of
# a connection that was tried; the last two are this machine's own firewall


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket of `family` connects to."""

    family: int
    sockaddr: tuple[Any, ...]

    def at(self, port: int) -> Address:
        """The same host at a port."""
        host, _, *scope = self.sockaddr
        return Address(self.family, (host, port, *scope))


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A name that was asked for; its one thread sets `answer`."""

    answer: Future[list[Address]]
    asked_s: float

    def is_over(self, now_s: float, remember_s: float) -> bool:
        """Whether to ask anew: it failed, or it was long ago."""
        return self.answer.done() and (self.answer.exception() is not None or now_s - self.asked_s > remember_s)


class Names:
    """Hosts to addresses; a name has one thread at a time that asks for it. Any thread."""

    def __init__(self, remember_s: float = REMEMBER_S) -> None:
        """`remember_s`: so old an answer may be."""
        self._remember_s = remember_s
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}

    def addresses(self, host: str, deadline_s: float) -> list[Address]:
        """At no port yet. Raises TimeoutError at the deadline, ConnectionError for what is no host."""
        answer = self.look_up(host)
        if (left_s := deadline_s - monotonic()) <= 0:
            raise TimeoutError("the deadline passed")
        try:  # an error is not raised itself: others have it, too, and it would hold this frame
            error = answer.exception(left_s)
        except TimeoutError as late:
            raise TimeoutError(f"{host}: no answer from the resolver") from late
        if error is not None:
            raise ConnectionError(str(error))
        return answer.result()

    def look_up(self, host: str) -> Future[list[Address]]:
        """As `addresses`, without waiting: a numeric host's answer is there, a name's comes. It cannot be cancelled."""
        answer: Future[list[Address]] = Future()
        answer.set_running_or_notify_cancel()
        if (numeric := _numeric(host)) is not None:
            answer.set_result(numeric)
            return answer
        with self._lock:
            now_s = monotonic()
            self._asked = {name: asked for name, asked in self._asked.items() if not asked.is_over(now_s, self._remember_s)}
            if (known := self._asked.get(host)) is not None:
                return known.answer
            self._asked[host] = _Asked(answer, now_s)
        try:
            threading.Thread(target=_ask, args=(answer, host), name=f"resolve-{host}", daemon=True).start()
        except RuntimeError as error:  # no thread is left
            answer.set_exception(ConnectionError(f"{host}: {error}"))
        return answer


def own_address_of(host: str) -> str:
    """Of the addresses of `host` the first that is this machine's, and reached by others, unless `host` itself is a loopback
    address or localhost. Waits for a resolver. Raises OSError."""
    found = [str(address.sockaddr[0]) for address in _addresses(host, 0) if is_own(address)]
    if not found:
        raise OSError(f"{host} is no address of this machine")
    if host == "localhost" or _numeric(host) is not None:
        return found[0]
    if (reached := next((one for one in found if not ip_address(one).is_loopback), None)) is None:
        raise OSError(f"{host} is {found[0]} here, which nobody else reaches")
    return reached


def is_own(address: Address) -> bool:
    """Whether it is one of this machine's."""
    try:
        with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
            probe.bind(address.at(0).sockaddr)
    except OSError:
        return False
    return True


def _ask(answer: Future[list[Address]], host: str) -> None:
    try:
        answer.set_result(_addresses(host, 0))
    except (OSError, UnicodeError) as error:
        answer.set_exception(ConnectionError(f"{host}: {error}"))


def _numeric(host: str) -> list[Address] | None:
    try:
        return _addresses(host, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def _addresses(host: str, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]
