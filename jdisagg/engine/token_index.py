"""Token ranges, and where their tokens lie: from a page table to the index arrays of an export or import."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spans(num_tokens: int, most: int) -> list[tuple[int, int]]:
    """[0, num_tokens) as ranges [begin, end) of at most `most` tokens, in order."""
    return [(begin, min(begin + most, num_tokens)) for begin in range(0, num_tokens, most)]


def token_index(pages: Sequence[int], begin: int, end: int, *, page_size: int, width: int) -> np.ndarray:
    """(page, offset) i32[2, width] of tokens [begin, end), at most `width`, of the sequence in `pages`.

    The rest, all of it for an empty range, names the null page. Looks at the pages of the range alone, a page at a time.
    """
    assert 0 <= begin <= end <= begin + width, f"tokens [{begin}, {end}), wanted at most {width}"
    first, stop = begin // page_size, -(-end // page_size)
    assert stop <= len(pages), f"tokens [{begin}, {end}) need {stop} pages of {page_size}, got {len(pages)}"
    where = np.zeros((2, width), np.int32)
    of_page = np.fromiter(pages[first:stop], np.int32, count=stop - first) if begin < end else np.zeros(0, np.int32)
    skip, count = begin - first * page_size, end - begin
    where[0, :count] = np.repeat(of_page, page_size)[skip : skip + count]
    where[1, :count] = np.arange(begin, end, dtype=np.int32) % page_size
    return where
