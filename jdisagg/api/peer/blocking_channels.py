"""Blocking channels to peers, one for each, for any thread. One that was at rest for long is replaced at its next use."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import grpc

from jdisagg.api.channels import Credentials, may_have_left, open_blocking_channel


@dataclass(slots=True, eq=False)
class _Entry:
    channel: grpc.Channel
    num_users: int = 0
    used_at_s: float = 0.0


class BlockingChannels:
    """`use` a channel, `drop` it when its connection is no good, `close` them all."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, peer: str) -> Iterator[grpc.Channel]:
        """The channel to HOST:PORT. Raises ConnectionError once all are closed."""
        left = None
        with self._lock:
            if self._closed:
                raise ConnectionError("the source is closed")
            entry = self._entries.get(peer)
            if entry is not None and not entry.num_users and may_have_left(monotonic() - entry.used_at_s):
                left, entry = entry, None
            if entry is None:
                entry = self._entries[peer] = _Entry(open_blocking_channel(peer, self._credentials))
            entry.num_users += 1
        if left is not None:
            left.channel.close()
        try:
            yield entry.channel
        finally:
            with self._lock:
                entry.num_users -= 1
                entry.used_at_s = monotonic()

    def drop(self, peer: str, channel: grpc.Channel | None = None) -> None:
        """Close it, or whichever there is: the next use connects anew instead of waiting out this connection's back-off.
        Calls in progress end."""
        with self._lock:
            entry = self._entries.get(peer)
            if entry is not None and channel in (None, entry.channel):
                del self._entries[peer]
                channel = entry.channel
        if channel is not None:
            channel.close()

    def abandon(self, peer: str, channel: grpc.Channel) -> None:
        """It has a call that gRPC could start no thread for, and would wait for that one for ever in every later call, when it
        is closed, and when it is collected: what is left of it stays until the process ends."""
        with self._lock:
            entry = self._entries.get(peer)
            if entry is not None and channel is entry.channel:
                del self._entries[peer]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def close(self) -> None:
        """Close every channel; calls in progress end."""
        with self._lock:
            self._closed = True
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.channel.close()
