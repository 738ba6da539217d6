"""Sockets that listen, what to tell the user when one cannot, and how many connections one takes."""

from __future__ import annotations

import errno
import os
import resource
import socket

from jdisagg.core.errors import ConfigError

BACKLOG = 2048
SHARE = 0.4  # of the descriptors that this process may have, for the connections of one port; there are two, and what it opens
_UNCOUNTED = 2**31 - 1  # where gRPC's count of connections ends: told so many it aborts
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str = "127.0.0.1", port: int = 0, *, flag: str = "--port") -> socket.socket:
    """Bind now (port 0 = a free one); "::" is every address of this machine, as for gRPC.

    Raises ConfigError, which names `flag` when the port is taken, and --host when that is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error
        if number < 0 or number in _NOT_OURS:  # a resolver's errors are negative
            hint = "; write it without brackets" if host.startswith("[") else ""
            raise ConfigError(f"--host: {host} is not an address of this machine: {why}{hint}") from error
        raise ConfigError(
            f"{flag}: cannot listen on {host} port {port}: {why}; choose another port, or 0 for a free one"
        ) from error


def most_connections() -> int | None:
    """How many a port keeps, so that links to workers and routers, and the other port, find descriptors; None = any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY or limit >= _UNCOUNTED else round(SHARE * limit)
