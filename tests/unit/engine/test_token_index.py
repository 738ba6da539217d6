"""Index arrays of exports and imports: every token once, in order, in its own page; built without a loop over tokens."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.engine.token_index import token_index


@pytest.mark.covers("C01", "C02")
@given(data=st.data(), page_size=st.sampled_from([1, 4, 8, 16, 256]), num_pages=st.integers(1, 9))
def test_a_range_is_its_tokens_in_order_each_in_its_own_page(data, page_size, num_pages):
    pages = data.draw(st.permutations(range(1, num_pages + 1)))
    begin = data.draw(st.integers(0, num_pages * page_size))
    end = data.draw(st.integers(begin, num_pages * page_size))
    width = end - begin + data.draw(st.integers(0, 5))
    got = token_index(pages, begin, end, page_size=page_size, width=width)
    wanted = [(pages[token // page_size], token % page_size) for token in range(begin, end)]
    assert got.dtype == np.int32
    assert list(map(tuple, got.T.tolist())) == wanted + [(0, 0)] * (width - len(wanted))
    # cut anywhere, the parts are the whole
    middle = data.draw(st.integers(begin, end))
    parts = [
        token_index(pages, *ends, page_size=page_size, width=ends[1] - ends[0]) for ends in ((begin, middle), (middle, end))
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), got[:, : end - begin])


@pytest.mark.covers("X23")
@pytest.mark.parametrize("at", [0, 5, 16, 32])
def test_an_empty_range_is_legal_and_names_the_null_page_alone(at):
    assert not token_index((3, 4), at, at, page_size=16, width=8).any()
    assert token_index((), 0, 0, page_size=16, width=0).shape == (2, 0)


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (5, 4), (-1, 3), (30, 33)])
def test_ranges_beyond_pages_or_width_are_refused(begin, end):
    with pytest.raises(AssertionError):
        token_index((3, 4), begin, end, page_size=16, width=8)


@pytest.mark.covers("C01")
@pytest.mark.parametrize("piece", [256, 32768])
def test_the_index_of_32k_tokens_takes_a_small_part_of_a_loop_over_them(piece):
    """0.2 ms as one range, 0.5 ms in pieces of 256, on a quiet core; such a loop takes 5. The best of many counts."""
    pages, took_s, loop_s = tuple(np.random.default_rng(0).permutation(np.arange(1, 2049)).tolist()), [], []
    for _ in range(30):
        started_s = time.perf_counter()
        for begin in range(0, 32768, piece):
            token_index(pages, begin, begin + piece, page_size=16, width=piece)
        took_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        np.array([(pages[token // 16], token % 16) for token in range(32768)], np.int32)
        loop_s.append(time.perf_counter() - started_s)
    print(f"\n32768 tokens in pieces of {piece}: {min(took_s) * 1e3:.2f} ms; a loop: {min(loop_s) * 1e3:.2f} ms")
    assert min(took_s) < min(loop_s) / 3
