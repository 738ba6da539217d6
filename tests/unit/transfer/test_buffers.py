"""Memory for arriving pieces: nobody gets what somebody still looks at, and little is kept."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from jdisagg.transfer.buffers import ALIGN_BYTES, LEAST_BYTES, WASTE, Buffers
from tests.unit.waiting import until

SIZE = LEAST_BYTES


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_a_block_is_used_again_when_nobody_looks_at_it() -> None:
    buffers = Buffers()
    first = buffers.take(SIZE)
    where, part = address(first), first[5:10]
    del first
    assert address(buffers.take(SIZE)) != where, "somebody still looks at a part of it"
    assert buffers.num_idle_bytes == SIZE
    del part
    assert buffers.num_idle_bytes == 2 * SIZE
    assert where in {address(view) for view in (buffers.take(SIZE), buffers.take(SIZE))}


def test_an_array_that_the_device_took_as_it_is_keeps_its_block() -> None:
    buffers = Buffers()
    room = buffers.take(SIZE)
    room[:] = b"\1" * SIZE
    array = jax.block_until_ready(jax.device_put(np.frombuffer(room, np.float32).reshape(8, -1)))
    where = address(room)
    assert array.unsafe_buffer_pointer() == where, "aligned memory is not copied"
    del room
    for _ in range(3):
        other = buffers.take(SIZE)
        assert address(other) != where
        other[:] = b"\2" * SIZE
        del other
    assert np.array_equal(np.asarray(array).view(np.uint8).ravel(), np.ones(SIZE, np.uint8))
    del array

    def is_let_go() -> bool:
        jax.block_until_ready(jax.numpy.zeros(1) + 1)  # the runtime lets go of the memory when it is next called
        return where in {address(view) for view in (buffers.take(SIZE), buffers.take(SIZE))}

    until(is_let_go)


@pytest.mark.parametrize("size", [1, 1000, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES + 7])
def test_memory_is_aligned_and_as_long_as_asked_for(size: int) -> None:
    buffers = Buffers()
    for _ in range(2):
        view = buffers.take(size)
        assert (len(view), view.readonly, address(view) % ALIGN_BYTES) == (size, False, 0)


def test_a_block_serves_smaller_pieces_but_not_much_smaller_ones() -> None:
    buffers = Buffers()
    where = address(buffers.take(WASTE * SIZE))
    assert address(buffers.take(SIZE)) == where
    smaller = buffers.take(WASTE * SIZE)
    del smaller
    assert address(buffers.take(WASTE * SIZE + 1)) != where


def test_the_oldest_blocks_go_when_too_much_is_idle() -> None:
    buffers = Buffers(keep_bytes=2 * SIZE)
    views = [buffers.take(SIZE) for _ in range(4)]
    last = [address(view) for view in views[2:]]
    while views:
        views.pop(0)
    assert buffers.num_idle_bytes == 2 * SIZE
    again = [buffers.take(SIZE), buffers.take(SIZE)]
    assert sorted(map(address, again)) == sorted(last)


def test_threads_never_share_a_block() -> None:
    buffers, wrong = Buffers(keep_bytes=3 * SIZE), list[int]()

    def use(mark: int) -> None:
        for _ in range(300):
            view = buffers.take(SIZE)
            view[:8] = view[-8:] = mark.to_bytes(8, "little")
            if view[:8] != view[-8:] or int.from_bytes(view[:8], "little") != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.num_idle_bytes <= 3 * SIZE
