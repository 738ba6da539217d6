"""Ports that are a test's own for as long as it runs, whether something listens there or not.

Linux gives servers one of some 7,000 free ports, and the test processes of this machine start dozens of servers a second: where
one stood, or nobody yet, soon another process's may stand.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Nobody listens there but servers of this test, of which any number may, one after the other; none: it refuses."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; it keeps away who wants any free port
        kept.bind((host.strip("[]"), 0))
        yield kept.getsockname()[1]
