"""Cache events <-> proto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jdisagg.api.kv_events.ring import KVEventRing, Snapshot
from jdisagg.kv.events import Batch, Cleared, KVEvent, Removed, Stored, as_events
from jdisagg.v1 import kv_events_pb2

PART_PAGES = 512  # of one message of a snapshot at most: a few ms of the event loop, then others have a turn
PART_TOKENS = 65536  # the same in tokens, far below the 4 MiB that gRPC clients accept unless told otherwise


def encode_batch(ring: KVEventRing, batch: Batch) -> kv_events_pb2.SubscribeResponse:
    """One tick's changes."""
    return _message(ring, batch.sequence, batch.time_s, batch.events)


def encode_snapshot(ring: KVEventRing, snapshot: Snapshot) -> Iterator[kv_events_pb2.SubscribeResponse]:
    """The messages of a snapshot, at least one, made one by one."""
    size = max(1, min(PART_PAGES, PART_TOKENS // ring.page_size))
    keys, pages = snapshot.keys, snapshot.pages
    for begin in range(0, max(1, len(keys)), size):
        end = begin + size
        message = _message(ring, snapshot.sequence, snapshot.time_s, as_events(keys[begin:end], pages[begin:end]))
        message.snapshot = True
        message.more = end < len(keys)
        yield message


def decode_events(message: kv_events_pb2.SubscribeResponse) -> list[KVEvent]:
    """Its events, in order. Raises ValueError for a kind that this build does not know."""
    return [_decode(event) for event in message.events]


def _message(ring: KVEventRing, sequence: int, time_s: float, events: Iterable[KVEvent]) -> kv_events_pb2.SubscribeResponse:
    return kv_events_pb2.SubscribeResponse(
        epoch=ring.epoch,
        pool=ring.pool,
        sequence=sequence,
        timestamp_s=time_s,
        block_size=ring.page_size,
        events=[_encode(event) for event in events],
    )


def _encode(event: KVEvent) -> kv_events_pb2.KVEvent:
    match event:
        case Stored(keys=keys, parent=parent, token_ids=token_ids, root=root):
            stored = kv_events_pb2.BlocksStored(
                block_hashes=keys, parent_block_hash=parent, token_ids=token_ids, root_hash=root
            )
            return kv_events_pb2.KVEvent(stored=stored)
        case Removed(keys=keys):
            return kv_events_pb2.KVEvent(removed=kv_events_pb2.BlocksRemoved(block_hashes=keys))
        case Cleared():
            return kv_events_pb2.KVEvent(cleared=kv_events_pb2.BlocksCleared())


def _decode(event: kv_events_pb2.KVEvent) -> KVEvent:
    match event.WhichOneof("kind"):
        case "stored":
            it = event.stored
            parent = it.parent_block_hash if it.HasField("parent_block_hash") else None
            return Stored(tuple(it.block_hashes), parent, tuple(it.token_ids), it.root_hash)
        case "removed":
            return Removed(tuple(event.removed.block_hashes))
        case "cleared":
            return Cleared()
        case kind:
            raise ValueError(f"a KV event of kind {kind}, wanted stored, removed or cleared; update this client")
