"""How parts of grammars are written in Lark, as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable


def in_a_line(value: object) -> str:
    """JSON, for a `%json` rule."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def token_ranges(token_ids: Iterable[int]) -> str:
    """Some tokens, in any order, as they stand between `<[` and `]>`: `3,7-9`."""
    ranges = list[list[int]]()
    for token_id in sorted(set(token_ids)):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
