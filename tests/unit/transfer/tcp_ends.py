"""What the tests of plain sockets share: reading one piece, and how many threads serve connections."""

from __future__ import annotations

import threading
import time

from jdisagg.transfer.tcp_source import TcpSource
from tests.unit.reading import read_whole

HOST = "127.0.0.1"
BIG = 16 * 2**20  # more than socket buffers hold
SECRET = "00" * 16


def read(source: TcpSource, locator: str, *, peer: str = "p", within_s: float = 30.0) -> bytes:
    return read_whole(source, peer, locator, time.monotonic() + within_s)


def ends(thread_name: str, within_s: float = 30.0) -> bool:
    """Whether no thread of the name is left in time."""
    return leaves(thread_name, 0, within_s)


def leaves(thread_name: str, num_threads: int, within_s: float = 30.0) -> bool:
    """Whether no more threads of the name than that are left in time."""
    until_s = time.monotonic() + within_s
    while len(threads_called(thread_name)) > num_threads:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def threads_called(thread_name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(thread_name)}
