"""Backend "jax": pieces go from P's devices to D's devices through JAX's transfer server.

    P's engine   publish -> lane: cut for D's mesh, checksum, confirm, offer under a uuid -> Published(locator)
    D's engine   fetch -> lane of the peer: pull every part onto its device, confirm, join, verify, confirm -> PieceArrived

A locator is "HOST:PORT uuid parts tokens sums": P offers the slabs of `parts` parts of each of the piece's arrays, cut along
heads and padded to `tokens`; `sums` is the kind of checksum. D makes the pull's specs from the announcement, after comparing
that with what it can import; what arrives is as long as they say, or the pull fails. Pieces in a form that nothing was
compiled for (another dtype or chunk size) pass through D's host memory. Between meshes that hold heads alike a full piece of
one slab a device is copied nowhere: what the gather made is offered, and what arrives is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.handoff.messages import ChunkReady
from jdisagg.kv.group import KVGroup
from jdisagg.kv.spec import QUANTISED, SCALES
from jdisagg.transfer.base import Piece, Post
from jdisagg.transfer.convert import NP_DTYPES
from jdisagg.transfer.cut import Cutter, Joiner
from jdisagg.transfer.jax_receivers import ServerPerReceiver
from jdisagg.transfer.jax_server import Pull, TransferConnection, TransferServer, TransferServers
from jdisagg.transfer.lanes import FetchJob, LaneFetcher
from jdisagg.transfer.publisher import LanePublisher
from jdisagg.transfer.room import Taken
from jdisagg.transfer.sums import SumKind, sum_on_host
from jdisagg.transfer.target import PieceError, PieceTarget, announce

NAME = "jax"
PULLS_AHEAD = 3  # with the one that is waited for, as many as P offers at a time
FORMAT = 3  # of locators and slabs


@dataclass(frozen=True, slots=True)
class Locator:
    """What D needs to pull a piece."""

    address: str
    uuid: int
    num_parts: int
    num_tokens: int
    sum_kind: SumKind

    def __str__(self) -> str:
        return f"{self.address} {self.uuid:x} {self.num_parts} {self.num_tokens} {self.sum_kind}"

    @classmethod
    def of(cls, ready: ChunkReady, target: PieceTarget) -> Locator:
        """Raises PieceError("device") when the text is none, or does not go with the announcement."""
        try:
            address, uuid, parts, tokens, kind = ready.locator.split(" ")
            locator = cls(address, int(uuid, 16), int(parts), int(tokens), SumKind(kind))
        except ValueError as error:
            raise PieceError("device", f"locator is {ready.locator!r}, wanted HOST:PORT uuid parts tokens sums") from error
        if not 0 <= locator.uuid < 2**64:  # of others jax raises TypeError
            raise PieceError("device", f"uuid {locator.uuid:x}, wanted 64 bits")
        if locator.num_parts < 1 or target.num_kv_heads % locator.num_parts:
            raise PieceError("device", f"{target.num_kv_heads} heads in {locator.num_parts} parts, wanted a divisor")
        if not ready.end - ready.begin <= locator.num_tokens <= 16 * target.chunk_tokens:
            raise PieceError("device", f"{ready.end - ready.begin} tokens padded to {locator.num_tokens}")
        return locator


def version(platform: str) -> str:
    """Of this backend on `platform`; unlike ones do not pair over it. The transfer server moves bytes as they lie on the device
    and compares their number alone: on TPU they lie in tiles, elsewhere in rows."""
    return f"{jax.__version__}, format {FORMAT}, {platform}"


def jax_publisher(servers: TransferServers, cutter: Cutter, post: Post) -> LanePublisher:
    """P's half."""
    cuts = _Cuts(servers, cutter)
    return LanePublisher(NAME, cuts, post, on_idle=cuts.rest)


class _Cuts:
    """Pieces cut for D's mesh, on the transfer server of who receives them."""

    def __init__(self, servers: TransferServers, cutter: Cutter) -> None:
        self._servers = ServerPerReceiver(servers)
        self._cutter = cutter
        self._offered: dict[str, tuple[TransferServer, Sequence[jax.Array]]] = {}  # from put to discard

    def put(self, key: str, piece: Piece) -> tuple[ChunkReady, int]:
        num_parts = self._cutter.num_parts(piece.head_shards)
        num_tokens = self._cutter.padded(piece.end - piece.begin)
        slabs, checksum = self._cutter.cut(piece.arrays, num_parts, piece.end - piece.begin)
        server = self._servers.of(piece.receiver, busy=self._busy())
        uuid = server.offer(slabs)
        self._offered[key] = (server, slabs)
        locator = Locator(server.address, uuid, num_parts, num_tokens, self._cutter.sum_kind)
        return announce(key, piece, checksum, backend=NAME, locator=str(locator)), num_tokens

    def discard(self, key: str) -> None:
        if offer := self._offered.pop(key, None):
            server, slabs = offer
            server.withdraw(slabs)

    def rest(self) -> None:
        """Nothing was asked for a while: free what receivers cost that get nothing any more."""
        self._servers.end_idle(busy=self._busy())

    def _busy(self) -> list[TransferServer]:
        return [server for server, _ in self._offered.values()]

    def close(self) -> None:
        self._servers.clear()


def jax_fetcher(servers: TransferServers, joiner: Joiner, target: PieceTarget, post: Post) -> LaneFetcher:
    """D's half."""
    pulls = _Pulls(servers, joiner, target)
    return LaneFetcher(NAME, pulls.obtain, post, on_end=pulls.disconnect)


class _Begun(NamedTuple):
    connection: TransferConnection
    pull: Pull
    taken: Taken


class _Pulls:
    """Pieces out of P's transfer server, of which several are on their way: while one is verified and placed, the next one
    arrives. A cancelled pull that is alone on its way costs the connection to its peer."""

    def __init__(self, servers: TransferServers, joiner: Joiner, target: PieceTarget) -> None:
        self._servers = servers
        self._joiner = joiner
        self._target = target
        self._forms = {target.dtype: joiner}  # by dtype of arriving pieces
        self._connections: dict[str, tuple[str, TransferConnection]] = {}  # by peer, each touched by its lane alone

    def obtain(self, job: FetchJob) -> Piece:
        ready = job.ready
        self._target.check(ready)
        locator = Locator.of(ready, self._target)
        known = self._knows(locator, ready)
        if not isinstance(job.begun, _Begun):
            # may take its time, or fail, for which it needs no room
            self._connection(job.peer, locator.address).open(locator.uuid, job.deadline_s)
            job.begun = self._begin(job, locator, job.await_room(self._target.room, self._num_tokens(locator, ready)))
        connection, pull, taken = job.begun
        self._begin_behind(job, connection)
        slabs = connection.end(pull, job.deadline_s, lambda: job.cancelled, lambda: self._begin_behind(job, connection))
        try:
            rows = self._joined(slabs, locator, ready) if known else self._through_host(slabs, locator, ready)
        except RuntimeError as error:
            raise PieceError("device", str(error)) from error
        job.begun = None
        del pull, slabs  # all who had what came, if it was copied
        taken.shrink(self._target.chunk_tokens)
        return self._target.arrived(ready, rows, taken, alias=True)

    def _knows(self, locator: Locator, ready: ChunkReady) -> bool:
        return ready.dtype == self._target.dtype and self._joiner.knows(locator.num_parts, locator.num_tokens)

    def _num_tokens(self, locator: Locator, ready: ChunkReady) -> int:
        """As many as which the piece takes on the device: what comes lies there from the begin of the pull on, and, where that
        is not the piece itself, beside what is made of it there."""
        if self._knows(locator, ready):
            is_whole = self._joiner.is_whole(locator.num_parts, locator.num_tokens)
            return locator.num_tokens + (0 if is_whole else self._target.chunk_tokens)
        came = locator.num_tokens * NP_DTYPES[ready.dtype].itemsize
        return max(self._target.chunk_tokens, -(-came // NP_DTYPES[self._target.dtype].itemsize))

    def _begin(self, job: FetchJob, locator: Locator, taken: Taken) -> _Begun:
        connection = self._connection(job.peer, locator.address)
        pull = connection.begin(locator.uuid, self._specs(job.ready.dtype, locator), job.deadline_s)
        return _Begun(connection, pull, taken)

    def _begin_behind(self, job: FetchJob, connection: TransferConnection) -> None:
        """Begin to pull what comes next over the same connection, while there is room, up to what ends it by connecting to
        another server. What fails here fails again when its turn has come."""
        wanted = (following for following in job.behind() if following.begun or not following.cancelled)
        for following in islice(wanted, PULLS_AHEAD):
            if isinstance(following.begun, _Begun) and following.cancelled:
                connection.forget(following.begun.pull)
            if following.begun is None and connection.is_open:
                with suppress(PieceError):
                    if following.num_tokens is None:
                        self._target.check(following.ready)
                        following.num_tokens = self._num_tokens(Locator.of(following.ready, self._target), following.ready)
                    if (taken := self._target.room.take(following.num_tokens, is_ahead=True)) is None:
                        return
                    locator = Locator.of(following.ready, self._target)
                    if self._connections.get(job.peer) != (locator.address, connection):
                        return
                    following.begun = self._begin(following, locator, taken)

    def _specs(self, dtype: str, locator: Locator) -> list[jax.ShapeDtypeStruct]:
        if dtype not in self._forms:
            self._forms[dtype] = joiner_of(self._target, dtype)
        return self._forms[dtype].specs(locator.num_parts, locator.num_tokens)

    def _joined(self, slabs: list[jax.Array], locator: Locator, ready: ChunkReady) -> KVGroup:
        kind = locator.sum_kind if ready.checksum else SumKind.NONE
        arrays, checksum = self._joiner.join(slabs, locator.num_parts, locator.num_tokens, kind)
        _verify(checksum, ready)
        return KVGroup(*arrays)

    def _through_host(self, slabs: list[jax.Array], locator: Locator, ready: ChunkReady) -> KVGroup:
        on_host = [np.asarray(slab) for slab in slabs]
        if ready.checksum:
            _verify(sum_on_host(on_host, locator.sum_kind), ready)
        arrays = self._forms[ready.dtype].join_on_host(on_host, locator.num_parts, locator.num_tokens)
        data = b"".join(array[:, : ready.end - ready.begin].tobytes() for array in arrays)
        return self._target.unpack(data, replace(ready, checksum=0))

    def _connection(self, peer: str, address: str) -> TransferConnection:
        known = self._connections.get(peer)
        if known is not None and known[0] == address:
            return known[1]
        self.disconnect(peer)
        connection = self._servers.connect(address)
        self._connections[peer] = (address, connection)
        return connection

    def disconnect(self, peer: str) -> None:
        """Nothing more is pulled from the peer; idempotent."""
        known = self._connections.pop(peer, None)
        if known is not None:
            known[1].drop()


def joiner_of(target: PieceTarget, dtype: str) -> Joiner:
    """For pieces of `dtype` that lie on D as `target` says; int8 comes with its scales."""
    shapes, dtypes = [target.shape], [NP_DTYPES[dtype]]
    if dtype == QUANTISED:
        shapes.append((*target.shape[:3], SCALES))
        dtypes.append(np.dtype(np.float32))
    return Joiner(shapes, dtypes, target.sharding)


def warm_up_fetches(joiner: Joiner, target: PieceTarget) -> int:
    """Compile what joins and places pieces, before READY; returns how many functions."""
    num_functions, form = joiner.warm_up(), (joiner.mesh.num_shards, target.chunk_tokens)
    slabs = [jnp.zeros(spec.shape, spec.dtype, device=spec.sharding) for spec in joiner.specs(*form)]
    target.place(KVGroup(*joiner.join(slabs, *form, SumKind.NONE)[0]), alias=True)
    return num_functions


def _verify(checksum: int, ready: ChunkReady) -> None:
    if ready.checksum and checksum != ready.checksum:
        raise PieceError("checksum", f"it is {checksum:016x}, wanted {ready.checksum:016x}")
