"""The only place that creates gRPC channels and servers: credentials, API key, limits of messages, keepalive, addresses.

Every channel has its own connection (no shared sub-channel pool), so closing one and opening another really reconnects at
once instead of inheriting the old one's back-off. Ports are never shared: a second bind of one port is an error.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from jdisagg.api.api_key import KeyedChannel, KeyGuard
from jdisagg.api.late_request import RequestGuard
from jdisagg.api.listening import listen, most_connections
from jdisagg.core.errors import ConfigError

MAX_MESSAGE_BYTES = 256 * 2**20  # that a client takes: log-probabilities of a long prompt are long
MAX_REQUEST_BYTES = 16 * 2**20  # of a client, as over HTTP: to read one of 256 MiB holds up everybody else for ten seconds
FULL_MESSAGE_BYTES = 4 * 2**20  # a message that gathers what has come since the last one takes no more behind so much
# That a server takes, whole in memory before anybody has looked at it: a full message, and one more request.
MAX_RECEIVED_BYTES = FULL_MESSAGE_BYTES + MAX_REQUEST_BYTES + 2**20
MAX_STREAMS = 2**14  # on one connection; a decode worker has one for each of the requests that wait for one prefill worker
MAX_IDLE_MS = 60_000  # without an RPC, until a server ends a connection; who comes back connects again. Our own channels go
LEAVE_AFTER_MS = 30_000  # before: gRPC writes of a connection that a server has ended, and a call may meet that end. They do so
# only once (grpc/grpc#38454): those that are used again do not rest for so long
NO_GRPC = "answers, but not in gRPC: it may be an HTTP port; give that of its gRPC server (--grpc-port)"

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 12_000),  # as long the kernel waits for an acknowledgement: a lease, and the way back
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.client_idle_timeout_ms", LEAVE_AFTER_MS),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the connection attempt's time-out
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_NO_READING_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """How a process proves who it is, on connections in plain text (a private network). None = nothing asked for, nothing
    sent."""

    api_key: str | None = field(default=None, repr=False)  # servers ask for it, channels send it
    client_api_key: str | None = field(default=None, repr=False)  # which servers take of clients


INSECURE = Credentials()


def open_channel(address: str, credentials: Credentials = INSECURE, *, reads_ahead: bool = True) -> grpc.aio.Channel:
    """An asyncio channel to HOST:PORT; connects on first use. The caller closes it. `reads_ahead` False: of what this process
    has not read yet it holds 64 KiB, then the other side waits; gRPC alone lets that grow to megabytes."""
    options = _CHANNEL_OPTIONS if reads_ahead else (*_CHANNEL_OPTIONS, *_NO_READING_AHEAD)
    channel = grpc.aio.insecure_channel(address, options=options)
    return cast(grpc.aio.Channel, KeyedChannel(channel, credentials.api_key)) if credentials.api_key else channel


def open_blocking_channel(address: str, credentials: Credentials = INSECURE) -> grpc.Channel:
    """A channel for a plain thread. The caller closes it."""
    channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return cast(grpc.Channel, KeyedChannel(channel, credentials.api_key)) if credentials.api_key else channel


def speaks_no_grpc(error: Any) -> bool:
    """Whether that is why an RPC failed: whoever listens there answers in something else (`NO_GRPC`)."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "Failed parsing HTTP/2" in (error.details() or "")


def make_server(credentials: Credentials = INSECURE) -> grpc.aio.Server:
    """An asyncio server without services or ports; `bind` it, then `await server.start()`. Asks for the API key, if any.

    Hangs up on connections beyond its share of the descriptors: gRPC alone would take them all, and nothing else got one."""
    guards = [KeyGuard(credentials.api_key, credentials.client_api_key)] if credentials.api_key else []
    most = most_connections()
    options = _SERVER_OPTIONS if most is None else (*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most))
    return grpc.aio.server(interceptors=[*guards, RequestGuard()], options=options)


def bind(server: grpc.aio.Server, host: str = "127.0.0.1", port: int = 0) -> str:
    """Bind before `start`; port 0 picks a free one. Returns HOST:PORT as bound; raises ConfigError when it is taken."""
    wanted = join_address(host, port)
    listen(host, port, flag="--grpc-port").close()  # says why not; gRPC does not
    try:
        bound = server.add_insecure_port(wanted)
    except RuntimeError as error:
        told = f"--grpc-port: cannot listen on {wanted}; choose another port, or 0 for a free one"
        raise ConfigError(told) from error
    return join_address(host, bound)


def advertised(bound: str, advertise_host: str | None, advertise_port: int | None = None) -> str:
    """HOST:PORT that other machines use for a server bound at `bound`; a wildcard becomes this machine's name."""
    host, _, port = bound.rpartition(":")
    if advertise_host is None:
        advertise_host = socket.gethostname() if host in ("0.0.0.0", "[::]", "::") else host.strip("[]")
    return join_address(advertise_host, int(port) if advertise_port is None else advertise_port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def fill_message(waiting: deque[T], encode: Callable[[T], M]) -> list[M]:
    """Take from `waiting` what one message takes, encoded; what is left is for the next one."""
    taken: list[M] = []
    num_bytes = 0
    while waiting and num_bytes < FULL_MESSAGE_BYTES:
        taken.append(encode(waiting.popleft()))
        num_bytes += taken[-1].ByteSize()
    return taken
