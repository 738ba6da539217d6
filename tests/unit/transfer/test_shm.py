"""Shared memory of P: what is freed is never read, what is dead is not there, and nothing has a name."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest

from jdisagg.transfer import shm_backend
from jdisagg.transfer.shm_backend import Arena, ShmSource, ShmStore, same_host_token
from tests.unit.reading import read_whole


def stored(store: ShmStore, key: str, data: bytes) -> str:
    return store.put(key, data)


def read(locator: str) -> bytes:
    return read_whole(ShmSource(), "peer", locator, time.monotonic() + 60)


def test_bytes_come_back_and_room_is_used_again() -> None:
    store = ShmStore()
    first = stored(store, "a", b"a" * 1000)
    second = stored(store, "b", b"b" * 3000)
    assert (read(first), read(second)) == (b"a" * 1000, b"b" * 3000)
    store.discard("a")
    third = stored(store, "c", b"c" * 500)
    assert third.split()[3] == first.split()[3], "the freed room"
    with pytest.raises(KeyError, match="lease"):
        read(first)
    assert read(third) == b"c" * 500
    store.close()
    store.close()


def test_a_piece_overwritten_while_it_is_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_backend, "PART_BYTES", 16)
    store = ShmStore()
    room = memoryview(bytearray(64))
    parts = ShmSource().read_into("peer", stored(store, "a", b"a" * 64), room, time.monotonic() + 60)
    assert room[: next(parts)] == b"a" * 16
    store.discard("a")
    stored(store, "b", b"b" * 64)
    with pytest.raises(KeyError):
        list(parts)
    store.close()


def test_a_read_ends_at_its_deadline() -> None:
    store = ShmStore()
    with pytest.raises(TimeoutError):
        read_whole(ShmSource(), "peer", stored(store, "a", b"a"), time.monotonic() - 1)
    store.close()


def test_a_piece_longer_than_its_room_is_refused() -> None:
    store = ShmStore()
    with pytest.raises(BufferError, match="has 64 bytes, not 63"):
        read_whole(ShmSource(), "peer", stored(store, "a", b"a" * 64), time.monotonic() + 60, room_bytes=63)
    store.close()


@pytest.mark.parametrize("locator", ["", "x", "1 2 3", "999999999 3 1 0 00", "k"])
def test_a_locator_of_nothing_is_unknown(locator: str) -> None:
    with pytest.raises(KeyError):
        read(locator)


@pytest.mark.parametrize("begin", ["-64", str(2**63), str(2**80)])
def test_a_locator_of_room_that_no_file_has_is_unknown(begin: str) -> None:
    store = ShmStore()
    pid, number, inode, _, nonce = stored(store, "a", b"a").split(" ")
    with pytest.raises(KeyError, match="wanted the locator"):
        read(f"{pid} {number} {inode} {begin} {nonce}")
    store.close()


def test_a_closed_arena_is_gone_and_leaves_no_descriptor() -> None:
    store = ShmStore()
    locator = stored(store, "a", b"a")
    inode = int(locator.split(" ")[2])
    assert inode in open_inodes()
    store.close()
    assert inode not in open_inodes()
    with pytest.raises(KeyError):
        read(locator)
    with pytest.raises(ValueError, match="closed"):
        store._arena.put(b"late")


def open_inodes() -> set[int]:
    """Of what this process has open."""
    found = set[int]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # others of this process close theirs
            found.add(os.fstat(int(number)).st_ino)
    return found


def test_an_empty_arena_gives_memory_back_beyond_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_backend, "KEEP_BYTES", 4096)
    arena = Arena()
    slots = [arena.put(bytes(10_000)) for _ in range(3)]
    number = int(arena.where.split()[1])
    assert os.fstat(number).st_size > 30_000
    for slot in slots:
        arena.free(slot)
    assert os.fstat(number).st_size == 4096
    arena.close()


def test_rooms_of_every_size_never_overlap() -> None:
    store, kept = ShmStore(), {}
    for index in range(300):
        data = bytes([index % 251]) * (1 + 37 * index % 1777)
        kept[f"k{index}"] = (stored(store, f"k{index}", data), data)
        if index % 3 == 2:
            store.discard(f"k{index - 1}")
            del kept[f"k{index - 1}"]
    assert all(read(locator) == data for locator, data in kept.values())
    store.close()


def test_the_token_names_this_kernel_and_these_process_ids() -> None:
    assert same_host_token() == same_host_token()
    assert os.readlink("/proc/self/ns/pid") in same_host_token()
