"""Which datagrams arrive under each cut of the network between hosts. Run on a network of its own; prints one JSON object:
cut -> who > whom -> what became of a small and of a large one, where they did not both arrive."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos_kit.cuts import CUTS, HOSTS, STRANGER
from chaos_kit.network import Host, Network

PORT, SMALL, LARGE = 5000, 100, 1400
WAIT_S = 0.25  # for those that first have to ask where to
HEALED_S = 10.0  # a new cable, and a neighbour that did not answer, take a second each
CLONE_NEWNET = 0x40000000
NUMBERS = itertools.count()  # of looks: what an earlier one sent may be on its way still
LIBC = ctypes.CDLL(None, use_errno=True)


def socket_of(host: Host) -> socket.socket:
    """It stays in the namespace it was made in, wherever its thread goes."""
    if host.enter:
        descriptor = os.open(f"/proc/{host.enter[2]}/ns/net", os.O_RDONLY)
        assert LIBC.setns(descriptor, CLONE_NEWNET) == 0, errno.errorcode[ctypes.get_errno()]
        os.close(descriptor)
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setblocking(False)
    one.bind((host.address, PORT))
    return one


def received(one: socket.socket) -> set[str]:
    found = set()
    while True:
        try:
            found.add(one.recv(2 * LARGE).decode().rstrip("."))
        except BlockingIOError:
            return found
        except OSError:  # of what was sent: that there is no such host
            continue


def fates(network: Network, sockets: dict[str, socket.socket]) -> dict[str, list[str]]:
    hosts = {"client": network.client, **network.hosts}
    pairs = [pair for pair in itertools.permutations(sockets, 2) if STRANGER not in pair]
    refused, number = {}, next(NUMBERS)
    for (one, other), size in itertools.product(pairs, (SMALL, LARGE)):
        text = f"{number} {one} > {other} {size}"
        try:
            sockets[one].sendto(text.ljust(size, ".").encode(), (hosts[other].address, PORT))
        except OSError as error:
            refused[text] = errno.errorcode[error.errno or 0]
    on_the_way = 2 * len(pairs) - len(refused)
    until_s, is_over = time.monotonic() + WAIT_S, False
    came: set[str] = set()
    while len(came) < on_the_way and not is_over:
        time.sleep(0.01)
        is_over = time.monotonic() >= until_s  # it is looked once more: this process may have stood still
        came.update(*map(received, sockets.values()))
    found = {}
    for one, other in pairs:
        texts = [f"{number} {one} > {other} {size}" for size in (SMALL, LARGE)]
        became = [refused.get(text, "arrived" if text in came else "lost") for text in texts]
        if became != ["arrived"] * 2:
            found[f"{one} > {other}"] = became
    return found


def broken(network: Network, sockets: dict[str, socket.socket]) -> dict[str, list[str]]:
    """What is lost for good."""
    until_s = time.monotonic() + HEALED_S
    while (found := fates(network, sockets)) and time.monotonic() < until_s:
        pass
    return found


def main() -> None:
    network = Network((*HOSTS, STRANGER))
    try:
        found = {}
        sockets = {}
        for name, host in {"client": network.client, **network.hosts}.items():
            with ThreadPoolExecutor(1) as thread:  # its own, which ends elsewhere than it began
                sockets[name] = thread.submit(socket_of, host).result()
        found["before"] = broken(network, sockets)
        for cut in CUTS:
            cut.begin(network)
            found[cut.name] = fates(network, sockets)
            network.heal()
            found[f"{cut.name}, healed"] = broken(network, sockets)
        holders = [host.enter[2] for host in network.hosts.values()]
    finally:
        network.close()
    found["left"] = {pid: ["alive"] for pid in holders if Path(f"/proc/{pid}").exists()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
