"""Blocking reads of published pieces for transfer threads: `PeerService.Fetch` over one channel per peer.

A read on which nothing comes for a while ends before its deadline: its connection is dead more often than its network is slow,
and the next read takes a new one. That one, and those after it until one flows again, wait for twice as long and ask for
small parts, so that what is slow, but moves, is seen to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import grpc

from jdisagg.api.channels import INSECURE, Credentials
from jdisagg.api.peer.blocking_channels import BlockingChannels
from jdisagg.api.peer.piece_wire import FETCH, decode_part
from jdisagg.api.peer.stalls import StallWatch, Watched
from jdisagg.core.errors import Stalled
from jdisagg.core.threads import check_threads
from jdisagg.core.told import told
from jdisagg.v1 import peer_pb2

STALL_S = 1.0  # as long as a peer that says nothing lives
SLOW_PATIENCE = 2
SLOW_PART_BYTES = 2**16


class GrpcByteSource:
    """`read_into` may be called from any thread."""

    def __init__(self, credentials: Credentials = INSECURE, *, stall_s: float = STALL_S) -> None:
        """`stall_s` without a byte end a read."""
        self._stalls = StallWatch(stall_s)
        self._slow: set[str] = set()  # peers whose latest read stalled, or nearly
        self._channels = BlockingChannels(credentials)
        self._was_short = False  # of a thread, when one was wanted last

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        """Fill `room` with the piece's bytes; see `ByteSource`."""
        channel = self._channels.of(peer)
        filled, left_s = 0, deadline_s - monotonic()
        if left_s <= 0.0:  # gRPC might serve it even so
            raise TimeoutError(f"piece {key} of {peer}: asked for when its time was over")
        try:
            parts, watched = self._ask(channel, peer, key, left_s)
        except (ValueError, RuntimeError) as error:
            raise ConnectionError(f"piece {key} of {peer}: {error}") from error
        try:
            for part in parts:
                watched.num_parts += 1
                end = filled + len(part)
                if end > len(room):
                    raise BufferError(f"piece {key} of {peer} is longer than {len(room)} bytes")
                room[filled:end] = part
                yield end - filled
                filled = end
        except grpc.RpcError as error:
            error.__traceback__ = None  # it is the call itself: they would hold each other, and `room`, until collected
            failed = True
        else:
            failed = False
        finally:
            self._stalls.unwatch(watched)
            watched.call.cancel()  # a reader that stops early must not leave the stream running
        if failed:
            raise self._failure(peer, key, channel, watched)
        if not watched.has_paused:
            self._slow.discard(peer)

    def _ask(self, channel: grpc.Channel, peer: str, key: str, left_s: float) -> tuple[Iterator[memoryview], Watched]:
        """Begin to read. Raises ValueError when the channel is dropped in this moment, RuntimeError when no thread is left."""
        is_slow = peer in self._slow
        if self._was_short:
            check_threads(1)  # gRPC would lose this channel, too
            self._was_short = False
        try:
            fetch = channel.unary_stream(
                FETCH, request_serializer=peer_pb2.FetchRequest.SerializeToString, response_deserializer=decode_part
            )
            call = fetch(peer_pb2.FetchRequest(key=key, part_bytes=SLOW_PART_BYTES if is_slow else 0), timeout=left_s)
        except RuntimeError:
            self._was_short = True
            self._channels.abandon(peer, channel)
            raise
        try:
            return call, self._stalls.watch(call, patience=SLOW_PATIENCE if is_slow else 1)
        except RuntimeError:
            call.cancel()
            raise

    def _failure(self, peer: str, key: str, channel: grpc.Channel, watched: Watched) -> Exception:
        """What the end of a call means."""
        call = watched.call
        if watched.has_stalled:
            self._slow.add(peer)
            self._channels.drop(peer, channel)
            return Stalled(f"piece {key} of {peer}: nothing came for {self._stalls.limit_s:g} s")
        code = call.code()
        text = f"piece {key} of {peer}: {code.name}: {told(call.details() or '')}"
        if code is grpc.StatusCode.NOT_FOUND:
            return KeyError(text)
        self._channels.drop(peer, channel)
        # a deadline: perhaps nothing passes on this connection any more
        return TimeoutError(text) if code is grpc.StatusCode.DEADLINE_EXCEEDED else ConnectionError(text)

    def drop(self, peer: str) -> None:
        """Nothing was read from the peer for a while: the next read connects anew, and takes its network for a good one. Reads
        in progress end with ConnectionError. Any thread."""
        self._slow.discard(peer)
        self._channels.drop(peer)

    def close(self) -> None:
        """Close every channel; reads in progress fail."""
        self._stalls.close()
        self._channels.close()
