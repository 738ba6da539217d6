"""Blocking channels to peers, one for each, for any thread."""

from __future__ import annotations

import ctypes
import threading

import grpc

from jdisagg.api.channels import Credentials, open_blocking_channel


class BlockingChannels:
    """One `of` each peer; `drop` it when its connection is no good, or nobody reads over it, `close` them all."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._closed = False

    def of(self, peer: str) -> grpc.Channel:
        """The channel to HOST:PORT. Raises ConnectionError once all are closed."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the source is closed")
            if (channel := self._channels.get(peer)) is None:
                channel = self._channels[peer] = open_blocking_channel(peer, self._credentials)
            return channel

    def drop(self, peer: str, channel: grpc.Channel | None = None) -> None:
        """Close it, or whichever there is: the next use connects anew instead of waiting out this connection's back-off.
        Calls in progress end."""
        with self._lock:
            if channel in (None, self._channels.get(peer)):
                channel = self._channels.pop(peer, None)
        if channel is not None:
            channel.close()

    def abandon(self, peer: str, channel: grpc.Channel) -> None:
        """It has a call that gRPC could start no thread for, and would wait for that one for ever in every later call, when it
        is closed, and when it is collected: what is left of it stays until the process ends."""
        with self._lock:
            if channel is self._channels.get(peer):
                del self._channels[peer]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def close(self) -> None:
        """Close every channel; calls in progress end."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()
