"""Token ranges against a plain set of positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.handoff.spans import Spans

RANGES = st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@pytest.mark.covers("X23")
@given(st.lists(RANGES, max_size=12), RANGES, st.integers(0, 17), st.data())
def test_spans_equal_a_set_of_positions(
    ranges: list[tuple[int, int]], probe: tuple[int, int], at: int, data: st.DataObject
) -> None:
    spans, positions, added = Spans(), set[int](), list[tuple[int, int]]()
    for begin, end in ranges:
        new = set(range(begin, end))
        assert spans.overlaps(begin, end) == bool(new & positions)
        if not new & positions:
            spans.add(begin, end)
            positions |= new
            added.append((begin, end))
    if added:
        gone = data.draw(st.sampled_from(added))
        spans.remove(*gone)
        positions -= set(range(*gone))
    assert spans.num_tokens == len(positions)
    assert spans.overlaps(*probe) == bool(set(range(*probe)) & positions)
    assert not spans.overlaps(at, at), "an empty range overlaps nothing"
    reach = at
    while reach in positions:
        reach += 1
    assert spans.reach(at) == reach


def test_empty_and_overlapping_ranges_are_our_bug() -> None:
    spans = Spans()
    spans.add(0, 4)
    assert not spans.overlaps(2, 2)
    with pytest.raises(AssertionError, match="empty"):
        spans.add(4, 4)
    with pytest.raises(AssertionError, match="overlaps"):
        spans.add(3, 5)
