"""Who is drawn of equally busy workers: rendezvous hashing, so that it does not change when others come or go."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from jdisagg.router.entry import Entry


def lot_of(entry: Entry, kin: bytes) -> bytes:
    """That of a worker for all requests of one `kin`; the lowest is drawn."""
    return _draw(entry.member.address, kin)


@lru_cache(maxsize=1 << 17)  # pairs; at every heartbeat of a decode worker those with all prefill workers are asked for
def seat_of(prefill: str, decode: str) -> bytes:
    """That of a prefill worker for a decode worker, by addresses: not the same one is first for all of these."""
    return _draw(prefill, hashlib.blake2b(decode.encode()).digest())


def _draw(address: str, kin: bytes) -> bytes:
    return hashlib.blake2b(address.encode(), key=kin, digest_size=8).digest()
