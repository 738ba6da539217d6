"""Backend "shm": pieces lie in shared memory of P, and a D on the same host reads them there.

The memory is one anonymous file (memfd), reached by others as /proc/PID/fd/N: it has no name, so nothing is left behind
whoever dies, and it is gone when P is. D opens it anew for every piece and so never keeps a dead P's memory.

    slot = nonce (16 bytes) | number of bytes (8) | bytes          at an offset that is a multiple of 64

A piece's locator is "pid fd inode offset nonce". Freeing a piece overwrites its nonce before the room is used again; D
compares the nonce before it reads and once more behind, so it never takes what a later piece has overwritten.
"""

from __future__ import annotations

import os
import secrets
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

HEADER_BYTES = 24
ALIGN_BYTES = 64
PART_BYTES = 2**18  # stays in the cache until the reader has seen it
MAX_FILE_BYTES = 2**62
KEEP_BYTES = 64 * 2**20  # of an empty arena: pages that are there already cost a fifth of new ones to write


def same_host_token() -> str:
    """Equal in two processes exactly when one can read the other's shared memory: kernel, process ids, and user.

    Raises OSError where the system has no such thing.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    os.close(os.memfd_create("jdisagg-probe"))
    return f"{boot} {os.readlink('/proc/self/ns/pid')} uid:{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece's room [begin, end) of the file."""

    begin: int
    end: int
    nonce: bytes


class Arena:
    """Room in one anonymous file. For one thread."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("jdisagg-pieces", os.MFD_CLOEXEC), "r+b", buffering=0)
        self.where = f"{os.getpid()} {self._file.fileno()} {os.fstat(self._file.fileno()).st_ino}"
        self._used: list[tuple[int, int]] = []  # sorted

    def put(self, data: bytes | memoryview) -> Slot:
        """Store `data`. Raises OSError when the system has no memory for it."""
        begin = self._find(-(-(HEADER_BYTES + len(data)) // ALIGN_BYTES) * ALIGN_BYTES)
        slot = Slot(begin, begin + HEADER_BYTES + len(data), secrets.token_bytes(16))
        insort(self._used, (slot.begin, slot.end))
        try:
            self._write(slot.begin + HEADER_BYTES, data)
            self._write(slot.begin, slot.nonce + len(data).to_bytes(8, "little"))
        except OSError:
            self._used.remove((slot.begin, slot.end))
            raise
        return slot

    def free(self, slot: Slot) -> None:
        """From now on nobody reads the slot; its room is used again. When nothing is left, most of the file's memory goes."""
        os.pwrite(self._file.fileno(), bytes(HEADER_BYTES), slot.begin)
        self._used.remove((slot.begin, slot.end))
        if not self._used and os.fstat(self._file.fileno()).st_size > KEEP_BYTES:
            os.ftruncate(self._file.fileno(), KEEP_BYTES)

    def close(self) -> None:
        """Give the memory back; idempotent. What is called later raises ValueError."""
        self._file.close()

    def _find(self, num_bytes: int) -> int:
        begin = 0
        for used_begin, used_end in self._used:
            if used_begin - begin >= num_bytes:
                break
            begin = -(-used_end // ALIGN_BYTES) * ALIGN_BYTES
        return begin

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[written:], offset + written


class ShmStore:
    """A ByteStore in an Arena."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._slots: dict[str, Slot] = {}  # from put to discard

    def put(self, key: str, data: bytes | memoryview) -> str:
        """Store the bytes; returns where they are. Raises OSError, and ValueError once closed."""
        slot = self._slots[key] = self._arena.put(data)
        return f"{self._arena.where} {slot.begin} {slot.nonce.hex()}"

    def discard(self, key: str) -> None:
        """Free the piece; unknown keys are ignored."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._arena.free(slot)

    def close(self) -> None:
        """Free everything."""
        self._slots.clear()
        self._arena.close()


class ShmSource:
    """A ByteSource that reads another process's Arena. Holds nothing between reads."""

    def read_into(self, peer: str, key: str, room: memoryview, deadline_s: float) -> Iterator[int]:
        """Fill `room` with the bytes at the locator `key`; see ByteSource."""
        gone = f"piece {key!r} of {peer}: acknowledged, or its lease or its process is over"
        try:
            pid, number, inode, begin = (int(word) for word in key.split(" ")[:4])
            nonce = bytes.fromhex(key.split(" ")[4])
            if not 0 <= begin < MAX_FILE_BYTES:  # else pread raises what no OSError is
                raise ValueError(begin)
        except (ValueError, IndexError) as error:
            raise KeyError(f"piece {key!r} of {peer}: wanted the locator of a shared-memory piece") from error
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise KeyError(gone) from error
        except OSError as error:
            raise ConnectionError(f"shared memory of {peer}, process {pid}: {error}") from error
        try:
            if os.fstat(descriptor).st_ino != inode:
                raise KeyError(gone)
            yield from _read_slot(descriptor, Slot(begin, begin + HEADER_BYTES + len(room), nonce), room, deadline_s)
        except KeyError as error:
            raise KeyError(gone) from error
        except OSError as error:
            if isinstance(error, TimeoutError | ConnectionError):
                raise
            raise ConnectionError(f"shared memory of {peer}, process {pid}: {error}") from error
        finally:
            with suppress(OSError):
                os.close(descriptor)


def _read_slot(descriptor: int, slot: Slot, room: memoryview, deadline_s: float) -> Iterator[int]:
    """Raises KeyError when something else is there."""
    header = os.pread(descriptor, HEADER_BYTES, slot.begin)
    if header[:16] != slot.nonce:
        raise KeyError
    filled, size = 0, int.from_bytes(header[16:], "little")
    if size > len(room):
        raise BufferError(f"the piece has {size} bytes, not {len(room)}")
    while filled < size:
        if monotonic() >= deadline_s:
            raise TimeoutError(f"{size - filled} bytes were not read yet")
        part = room[filled : min(size, filled + PART_BYTES)]
        count = os.preadv(descriptor, [part], slot.begin + HEADER_BYTES + filled)
        if not count:
            break
        filled += count
        yield count
    if os.pread(descriptor, len(slot.nonce), slot.begin) != slot.nonce:
        raise KeyError
