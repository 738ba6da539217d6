"""When two workers are known to compute unlike bits."""

from __future__ import annotations

import pytest

from jdisagg.core.bits import are_unlike


@pytest.mark.parametrize(
    ("ours", "theirs", "unlike"),
    [
        ("48-aa", "48-aa", False),
        ("48-aa", "48-bb", True),
        ("48-aa", "", False),  # `fast`, or too old to say
        ("", "48-bb", False),
        ("", "", False),
        ("48-aa", "15-bb", False),  # of another length: it holds no more
    ],
)
def test_only_what_both_have_tried_alike_can_be_unlike(ours: str, theirs: str, unlike: bool) -> None:
    assert are_unlike(ours, theirs) is unlike
    assert are_unlike(theirs, ours) is unlike
