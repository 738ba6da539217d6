"""`jax.experimental.transfer` behind a wrapper in which the states that kill, corrupt or hang cannot be reached.

    kills      no transport addresses, or fewer on D than on P     NUM_ADDRESSES on every worker, and Hello compares
               a server for which no thread is left                as many are started, and end, before it
               awaiting a pull of a deleted array                  `offer` and `withdraw` run on one thread, in that order
               P dies within the moment in which D connects: D's   nothing helps; D's streams go on as if it had died alone
               four further connections must not be refused
    corrupts   a uuid offered twice; a spec that does not match    uuids are random and never used again; see `jax_backend`
               two servers on one port                             port 0 always
    hangs      a uuid that was pulled before                       a connection pulls each one once
               an unknown uuid, a dead or frozen peer              `pull` has its own deadline, then breaks the connection
               arrays without elements                             refused here
               an array of several copies that is withdrawn while  arrays are cut into slabs of one copy, and `offer` takes
               it is pulled: some such pulls; the others leak on D none that is larger
               a frozen peer in the middle of a transfer: a        every peer has a server of its own, on P one to offer on,
               server's threads send to and receive from all       on D one for each connection
               of its peers in turn, and wait
               whoever connects and says nothing, as a D that        `jax_listeners` hangs up on them after a second
               freezes while it connects: all servers of P wait
    leaks      whatever is never pulled                            `withdraw` frees the arrays, the entry expires by itself
               a server that never reached its peer: its threads   a connection is tried before a server is started for it
               a pull of an offer that has expired: four sockets   OFFER_S is longer than leases and fetches are
               P freezes just as D connects, and D gives up: eight nothing helps; a third of such moments does it
               threads, four sockets and some copies' memory of P,
               for good

A withdrawn array answers a pull with an error at once. A broken connection never recovers: it is dropped, and the next pull
makes a new one.
"""

from __future__ import annotations

import importlib
import secrets
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic, sleep
from typing import Any

import jax

from jdisagg.core.host_names import NO_WAY, own_address_of
from jdisagg.core.threads import check_threads
from jdisagg.transfer.jax_listeners import bound_first_words
from jdisagg.transfer.target import PieceError

NUM_THREADS = 12  # a server takes eight
NUM_ADDRESSES = 4  # sockets for bytes; equal on all workers of a version
COPY_BYTES = 32 * 2**20  # of one copy on its way, and of an array at most; equal on all workers of a version. A piece of 256
# tokens of an 8B model: on a CPU it costs 20 % to cut it and join it again
PARALLEL_COPIES = 4  # for each of which a server has COPY_BYTES of memory once it needed it
OFFER_S = 3600.0  # one that is never pulled is forgotten then; its arrays are freed earlier, by `withdraw`. A pull may wait
# minutes for its turn on a slow network, for as long as its request has
CONNECT_TIMEOUT_S = 2.0
SHUT_S = 0.2  # a try that failed speaks for the pulls that waited for it meanwhile
_FIRST_NAP_S, _LONGEST_NAP_S = 0.0001, 0.0005
_MAX_REMEMBERED = 4096
_STILL_S = 1.0  # without a piece: then the connection is at fault, else a request that had too little time
_CANCEL_GRACE_S = 0.25  # a cancelled pull that ends by itself costs no connection


class Unsupported(RuntimeError):
    """This jax, or this platform, has no transfer server; says why."""


def own_address(host: str) -> str:
    """The address of this machine that `host` stands for, with brackets if it is an IPv6 one. Raises Unsupported."""
    try:
        address = own_address_of(host.strip("[]"))
    except (OSError, UnicodeError) as error:
        raise Unsupported(f"{error}; give --advertise-host an address of this machine") from error
    return f"[{address}]" if ":" in address else address


class TransferServers:
    """Starts one server for every peer. Any thread."""

    def __init__(self, devices: Sequence[Any], host: str) -> None:
        """Start the first, which listens on free ports of `host`, an address that peers reach, or a name for one. Raises
        Unsupported."""
        self._devices, self._host = devices, own_address(host)
        self._spare = [TransferServer(devices, self._host)]

    def start(self) -> TransferServer:
        """One that nobody else uses; it ends with the last reference to it. Raises Unsupported."""
        try:
            return self._spare.pop()
        except IndexError:
            return TransferServer(self._devices, self._host)

    def connect(self, address: str) -> TransferConnection:
        """To another process's server; connects when first pulled from."""
        return TransferConnection(self.start, address)


class TransferServer:
    """P offers arrays to one peer, or D connects to one. `offer`, `withdraw`: one thread."""

    def __init__(self, devices: Sequence[Any], host: str) -> None:
        """Listen on free ports of `host`, an address that peers reach and no name: of one jax makes 0.0.0.0, and tells peers to
        connect to that. Raises Unsupported."""
        try:
            transfer = importlib.import_module("jax.experimental.transfer")
            check_threads(NUM_THREADS)
            self._server: Any = transfer.start_transfer_server(
                devices[0].client,
                f"{host}:0",
                [f"{host}:0"] * NUM_ADDRESSES,
                max_num_parallel_copies=PARALLEL_COPIES,
                transfer_size=COPY_BYTES,
            )
            bound_first_words()
            port = int(self._server.address().rpartition(":")[2])
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
            raise Unsupported(f"jax {jax.__version__} on {devices[0].platform}: {error!r}") from error
        self.address = f"{host}:{port}"

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        """Let one peer pull these arrays, which are whole and no errors (waited for); returns the uuid to pull."""
        for array in arrays:
            assert array.nbytes <= COPY_BYTES, f"an array of {array.nbytes} bytes would take several copies"
            assert array.size, f"an array of shape {array.shape} has no elements and would never arrive"
            assert not array.is_deleted(), "a deleted array cannot be offered"
            assert len(array.sharding.device_set) == 1, "arrays are offered shard by shard"
        uuid = secrets.randbits(64)
        self._server.await_pull(uuid, list(arrays), timeout=datetime.now() + timedelta(seconds=OFFER_S))
        return uuid

    def withdraw(self, arrays: Sequence[jax.Array]) -> None:
        """Free offered arrays now, pulled or not. A pull under way fails, at once."""
        for array in arrays:
            if not array.is_deleted():
                array.delete()

    def connect(self, address: str) -> Any:
        """jax's connection to another server."""
        return self._server.connect(address)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pull:
    """Arrays on their way."""

    arrays: Sequence[Any]

    @property
    def is_through(self) -> bool:
        """Whether all are there, or errors."""
        return all(array.is_ready() for array in self.arrays)


class TransferConnection:
    """To one server, for one thread, over a server of its own. Several pulls may be on their way."""

    def __init__(self, start: Callable[[], TransferServer], address: str) -> None:
        self._start = start
        self._address = address
        self._server: TransferServer | None = None
        self._connection: Any = None
        self._pulled: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._begun: weakref.WeakSet[Pull] = weakref.WeakSet()  # over this connection, and wanted by somebody
        self._came_s = 0.0  # when something last came, or was first waited for
        self._why_shut, self._shut_until_s = "", 0.0  # how the last try failed

    @property
    def is_open(self) -> bool:
        """Whether to begin a pull takes no time."""
        return self._connection is not None

    def open(self, uuid: int, deadline_s: float) -> None:
        """Connect, unless that was done, to pull `uuid`; `begin` does it, too.

        Raises PieceError("unknown_key" | "connection" | "unreachable" | "timeout"), before `deadline_s` (monotonic).
        """
        if uuid in self._pulled:
            raise PieceError("unknown_key", "it was pulled before, and an offer can be pulled once")
        if self._connection is not None:
            return
        try:
            self._reach(deadline_s)
            self._server = self._start()
            self._connection = self._server.connect(self._address)
        except (RuntimeError, ValueError, OSError) as error:
            self.drop()
            raise PieceError("connection", str(error)) from error

    def begin(self, uuid: int, specs: Sequence[jax.ShapeDtypeStruct], deadline_s: float) -> Pull:
        """Ask for offered arrays. `specs` must be what was offered: nobody checks it for us. Raises as `open`."""
        self.open(uuid, deadline_s)
        try:
            self._pulled.append(uuid)
            if not self._begun:
                self._came_s = monotonic()
            pull = Pull(self._connection.pull(uuid, list(specs)))
        except (RuntimeError, ValueError, OSError) as error:
            self.drop()
            raise PieceError("connection", str(error)) from error
        self._begun.add(pull)
        return pull

    def _reach(self, deadline_s: float) -> None:
        """See `_try`."""
        if monotonic() < self._shut_until_s:
            raise PieceError("unreachable", self._why_shut)
        try:
            _try(self._address, deadline_s)
        except PieceError as error:
            if error.reason == "unreachable":
                self._why_shut, self._shut_until_s = error.detail, monotonic() + SHUT_S
            raise

    def end(
        self,
        pull: Pull,
        deadline_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[jax.Array]:
        """What came, whole and confirmed. `meanwhile` runs again and again until then.

        Raises PieceError("unknown_key" | "timeout" | "connection"), before `deadline_s` (monotonic) or soon after a cancel.
        """
        try:
            self._wait(pull, deadline_s, is_cancelled, meanwhile)
            arrays = jax.block_until_ready(list(pull.arrays))
            self._came_s = monotonic()
            return arrays
        except (RuntimeError, ValueError, OSError) as error:
            if "deleted or donated" in str(error):  # withdrawn; the connection is as good as before
                raise PieceError("unknown_key", f"withdrawn: {error}") from error
            self.drop()
            raise PieceError("connection", str(error)) from error
        finally:
            self._begun.discard(pull)

    def _wait(self, pull: Pull, deadline_s: float, is_cancelled: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
        nap_s, grace_ends_s = _FIRST_NAP_S, None
        while not pull.is_through:
            if monotonic() >= deadline_s:
                if monotonic() - self._came_s >= _STILL_S or not self._others_wait(pull):
                    self.drop()
                raise PieceError("timeout", "the pull did not end in time")
            if grace_ends_s is None and is_cancelled():
                grace_ends_s = monotonic() + _CANCEL_GRACE_S
            if grace_ends_s is not None and monotonic() >= grace_ends_s:
                if not self._others_wait(pull):
                    self.drop()  # otherwise it would cost others their pieces, and P withdraws it
                raise PieceError("connection", "cancelled")
            meanwhile()
            sleep(nap_s)
            nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)

    def forget(self, pull: Pull) -> None:
        """Nobody wants it any more: for its sake the connection need not stay. Idempotent."""
        self._begun.discard(pull)

    def _others_wait(self, pull: Pull) -> bool:
        return any(other is not pull and not other.is_through for other in list(self._begun))

    def drop(self) -> None:
        """Fail what is on its way; forget the connection, and the server, whose thread may wait for bytes that never come."""
        connection, self._connection, self._server = self._connection, None, None
        self._begun.clear()
        if connection is not None:
            with suppress(RuntimeError, AttributeError):  # broken already, or a jax that breaks it when it is collected
                connection._poison_connection()


def _try(address: str, deadline_s: float) -> None:
    """Raises PieceError("unreachable") when nobody accepts a connection, ("timeout") when there was too little time for one, or
    an OSError of this machine."""
    host, _, port = address.rpartition(":")
    left_s = deadline_s - monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.001, min(CONNECT_TIMEOUT_S, left_s))).close()
    except TimeoutError as error:
        reason = "timeout" if left_s < CONNECT_TIMEOUT_S else "unreachable"
        raise PieceError(reason, f"{address} has not answered for {min(CONNECT_TIMEOUT_S, left_s):.1f} s") from error
    except OSError as error:
        if error.errno in NO_WAY:
            raise PieceError("unreachable", f"{address}: {error}") from error
        raise
