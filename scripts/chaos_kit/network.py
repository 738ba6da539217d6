"""Hosts joined by a switch on this machine, and what breaks between them: network namespaces, by `ip` alone.

    harness (br0, .1) -- bridge --+-- port of r  = veth = eth0 of r, .2
                                  +-- port of p1 = veth = eth0 of p1, .3   ..

Nothing here has a name that another run could see: a host's namespace lives as long as the process that holds it open, which
ends with this one, however that ends. What is broken is undone by `heal`, the last first.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

SUBNET = "10.77.0"
MTU, SMALL_MTU = 1500, 700
NOBODY = "02:00:00:00:de:ad"  # no host has this hardware address: the switch sends such frames everywhere, and all drop them
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_PROBE = "ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2 && unshare -n true"
_START = 'ip link set lo up && exec "$0" "$@"'
_OFF = "off0"  # a bridge that is down passes nothing on; a port of none would answer for this process's address
LIMIT_S = 10.0  # of one command


class NoNetwork(RuntimeError):
    """Hosts cannot be made on this machine; says what is missing."""


def way_in() -> tuple[str, ...]:
    """The beginning of a command that runs the rest of it on a network of its own, with nothing but a loopback, in which it may
    do everything: as root, or else as root of a user namespace. Raises NoNetwork."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise NoNetwork(f"{tool} is missing (package {package})")
    refused = []
    for command in (("unshare", "-n"), ("unshare", "-Urn")):
        done = _run([*command, "sh", "-c", _PROBE])
        if done.returncode == 0:
            return (*command, "sh", "-c", _START)
        refused.append(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    raise NoNetwork(f"the rights are missing to make network namespaces, bridges and veth pairs: {'; '.join(refused)}")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One end of a cable. `enter` begins a command that is to run there."""

    name: str
    address: str
    device: str
    enter: tuple[str, ...] = ()

    def ip(self, *arguments: str) -> None:
        """Run `ip` there. Raises RuntimeError with what it says."""
        done = _run([*self.enter, "ip", *arguments])
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: ip {' '.join(arguments)}: {done.stderr.strip()}")


class Network:
    """Made in the namespace of this process, which `way_in` has made for it. For one thread at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self.client = Host(name="client", address=f"{SUBNET}.1", device="br0")
        self.hosts: dict[str, Host] = {}
        self._holders: list[subprocess.Popen[bytes]] = []
        self._undo: list[Callable[[], None]] = []
        switch = self.client.ip
        switch(
            "link", "add", "br0", "address", "02:00:00:00:00:01", "type", "bridge"
        )  # else it takes one of a port that may go
        switch("link", "add", _OFF, "type", "bridge")
        switch("address", "add", f"{self.client.address}/24", "dev", "br0")
        switch("link", "set", "br0", "up")
        try:
            for number, name in enumerate(names, 2):
                self.hosts[name] = self._plugged_in(name, f"{SUBNET}.{number}")
        except BaseException:
            self.close()
            raise

    def _plugged_in(self, name: str, address: str) -> Host:
        holder = subprocess.Popen(
            ["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
        )
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"\n")
        if holder.stdout.read(1) != b"\n":  # once it is `cat`, it is in its namespace
            raise RuntimeError(f"{name}: no namespace, exit status {holder.wait(LIMIT_S)}")
        host = Host(name=name, address=address, device="eth0", enter=("nsenter", "-t", str(holder.pid), "-n"))
        port = _port(name)
        self.client.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        self.client.ip("link", "set", port, "master", "br0", "up")
        host.ip("link", "set", "lo", "up")
        host.ip("address", "add", f"{address}/24", "dev", "eth0")
        # One frame is one segment: a switch lets pass what the sender has not cut yet, whatever its size.
        host.ip("link", "set", "eth0", "gso_max_size", str(MTU), "gso_max_segs", "1", "up")
        return host

    # --- what breaks

    def hole(self, sender: str, receiver: str) -> None:
        """What one host sends the other is lost without a word."""
        end, to = self._end(sender), self._end(receiver).address
        end.ip("neighbour", "replace", to, "lladdr", NOBODY, "dev", end.device, "nud", "permanent")
        self._undo.append(partial(end.ip, "neighbour", "delete", to, "dev", end.device))

    def refuse(self, sender: str, receiver: str, kind: str) -> None:
        """`kind` of route: unreachable, prohibit or blackhole. The sender's own system tells it that there is no way, and drops
        what comes from there, as no way leads back."""
        end, to = self._end(sender), self._end(receiver).address
        end.ip("route", "add", kind, to)
        self._undo.append(partial(end.ip, "route", "delete", kind, to))

    def unplug(self, name: str) -> None:
        """Pull the cable: the host sees that it has none."""
        self._port_set(name, ("down",), ("up",))

    def strand(self, name: str) -> None:
        """The cable ends at a switch that is off, and the host does not see it."""
        self._port_set(name, ("master", _OFF), ("master", "br0"))

    def narrow(self, name: str) -> None:
        """The port takes small frames only, either way, and tells nobody."""
        self._port_set(name, ("mtu", str(SMALL_MTU)), ("mtu", str(MTU)))

    def impersonate(self, name: str, by: str) -> None:
        """Another host has the address, and resets the connections that it knows nothing of."""
        self.strand(name)
        other, address = self._end(by), self._end(name).address
        other.ip("address", "add", f"{address}/32", "dev", other.device)
        self._undo += [self._forget_neighbours, partial(other.ip, "address", "delete", f"{address}/32", "dev", other.device)]
        self._forget_neighbours()

    def heal(self) -> None:
        """Undo all of it."""
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        """Give up the hosts; their namespaces go once nobody runs there any more."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders.clear()

    def _end(self, name: str) -> Host:
        return self.client if name == self.client.name else self.hosts[name]

    def _port_set(self, name: str, broken: Sequence[str], whole: Sequence[str]) -> None:
        self.client.ip("link", "set", _port(name), *broken)
        self._undo.append(partial(self.client.ip, "link", "set", _port(name), *whole))

    def _forget_neighbours(self) -> None:
        for end in (self.client, *self.hosts.values()):
            end.ip("neighbour", "flush", "dev", end.device)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL)


def _port(name: str) -> str:
    return f"to-{name}"
