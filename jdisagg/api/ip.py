"""Hosts that are numeric addresses."""

from __future__ import annotations

import ipaddress


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, with or without brackets; None for what is none, a name. ::ffff:127.0.0.1, as a socket for both kinds of
    addresses shows it, is 127.0.0.1."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return address if isinstance(address, ipaddress.IPv4Address) else address.ipv4_mapped or address


def is_loopback(host: str) -> bool:
    """Whether it is an address of the machine's own that only itself reaches; no name is."""
    return (address := ip_of(host)) is not None and address.is_loopback
