"""Whether a worker that calls itself 127.0.0.1 is on another machine: nobody there would reach it, or, worse, somebody else."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import unquote

from jdisagg.api.ip import ip_of, is_loopback
from jdisagg.core.host_names import Address, is_own


def nobody_reaches(address: str, caller: str) -> str:
    """What to change where a worker at the loopback `address` calls from another machine, "" where all is well; `caller` as
    gRPC names it, like ipv4:10.0.0.7:41234."""
    host, there = address.rpartition(":")[0], _caller_ip(caller)
    if not (host == "localhost" or is_loopback(host)) or there is None or there.is_loopback or _is_ours(there):
        return ""
    return (
        f"it is on another host ({there}) and registered as {address}: for everybody else {host} is their own machine; start "
        f"it with --host 0.0.0.0 (or ::) and --advertise-host {there}, or whichever address or name others reach it by"
    )


def _caller_ip(caller: str) -> IPv4Address | IPv6Address | None:
    return ip_of(unquote(caller.partition(":")[2]).rpartition(":")[0])


def _is_ours(address: IPv4Address | IPv6Address) -> bool:
    """Whether this machine has the address: who calls from it means this machine, too."""
    return is_own(Address(socket.AF_INET if address.version == 4 else socket.AF_INET6, (str(address), 0)))
