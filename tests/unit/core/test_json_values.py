"""How deep decoded JSON is nested."""

from __future__ import annotations

import pytest

from jdisagg.core.json_values import MAX_DEPTH, is_too_deep


def nested(depth: int, innermost: object, *, in_objects: bool) -> object:
    """`innermost` in that many lists or objects."""
    value = innermost
    for _ in range(depth):
        value = {"a": 1, "b": value} if in_objects else [1, value, "x"]
    return value


@pytest.mark.parametrize("in_objects", [False, True])
def test_lists_and_objects_are_counted_and_not_what_is_in_them(in_objects: bool) -> None:
    for innermost, own in ((1, 0), ("x", 0), (None, 0), ([], 1), ({}, 1), ([1], 1), ({"a": 1}, 1)):
        for depth, too_deep in ((0, False), (MAX_DEPTH - own, False), (MAX_DEPTH - own + 1, True), (MAX_DEPTH + 5, True)):
            assert is_too_deep(nested(depth, innermost, in_objects=in_objects)) is too_deep, (innermost, depth)
