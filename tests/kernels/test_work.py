"""Rows and work lists, checked query by query against what they mean."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.rows import Rows, rows_of_tiles
from pallas_kernels.work import TURN, plan_work

plan = jax.jit(plan_work, static_argnames=("num_queries", "query_block", "key_block", "window"))
MOST, ROWS = 24, 5
ragged = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 20)), min_size=ROWS, max_size=ROWS)


@given(ragged, st.sampled_from([1, 4]), st.sampled_from([None, 3]))
def test_items_cover_every_query_once_and_every_key_it_sees(parts, query_block, window):
    starts, counts, lengths, at = [], [], [], 0
    for gap, count, before in parts:
        count = max(0, min(count, MOST - at - gap))
        at = min(at + gap, MOST)
        starts.append(at)
        counts.append(count)
        lengths.append(count + before)
        at += count
    rows = Rows(*(np.array(field, np.int32) for field in (starts, counts, lengths)))
    work = plan(rows, num_queries=MOST, query_block=query_block, key_block=4, window=window)
    seen = {}
    blocks = np.asarray(work.block)
    assert np.all(np.diff(blocks) >= 0)
    assert int(work.num_items) <= len(blocks)
    for item in range(len(blocks)):
        row, low, high = (int(field[item]) for field in (work.row, work.low, work.high))
        keys = range(int(work.first[item]) * 4, int(work.stop[item]) * 4)
        if item >= int(work.num_items):
            assert low == high == 0
            assert len(keys) == 0
            continue
        assert low < high <= query_block
        earliest = latest = int(work.offset[item]) + low
        for inside in range(low, high):
            position = int(work.offset[item]) + inside
            assert seen.setdefault(int(blocks[item]) * query_block + inside, (row, position)) == (row, position)
            earliest, latest = min(earliest, position), max(latest, position)
        first = 0 if window is None else max(0, earliest - window + 1)
        assert keys.start <= first < keys.start + 4
        assert keys.stop - 4 <= latest < keys.stop
    wanted = {
        start + index: (row, length - count + index)
        for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True))
        for index in range(count)
    }
    assert seen == wanted
    turns = np.asarray(work.packed)[TURN, :-1]
    assert np.array_equal(turns, np.cumsum(work.stop - work.first) - (work.stop - work.first))


@pytest.mark.parametrize(
    ("owners", "firsts", "filled", "counts"),
    [
        ([7, 7, 7], [0, 4, 8], [4, 4, 2], [10, 0, 0]),
        ([7, 7, 8], [0, 4, 8], [4, 3, 4], [7, 0, 4]),  # another owner at the next position
        ([7, 7, 7], [0, 8, 12], [4, 4, 4], [4, 8, 0]),  # a hole in the positions
        ([7, 7, 7], [0, 4, 8], [3, 4, 4], [3, 8, 0]),  # the tile before is not full
        ([7, 8, 8], [4, 0, 0], [4, 0, 0], [4, 0, 0]),  # padding tiles
        ([8, 8, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_tiles_that_follow_each_other_become_one_row(owners, firsts, filled, counts):
    positions = (np.array(firsts)[:, None] + np.arange(4)).reshape(-1)
    valid = (np.arange(4)[None] < np.array(filled)[:, None]).reshape(-1)
    rows = rows_of_tiles(np.where(valid, positions, -1).astype(np.int32), valid, np.array(owners, np.int32))
    assert rows.counts.tolist() == counts
    assert rows.starts.tolist() == [0, 4, 8]
    for count, first, length in zip(counts, firsts, rows.lengths.tolist(), strict=True):
        assert count == 0 or length == first + count
