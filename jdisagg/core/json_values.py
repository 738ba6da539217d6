"""Values that were JSON: what is a number, and how deep they may be nested."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

MAX_DEPTH = 200  # Python gives up near 1000 levels, less what is on its stack and what is wrapped around a value
_CONTAINERS = (dict, list)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Python calls true and false whole numbers, JSON does not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold: no NaN or infinity, nor a whole number beyond all floats."""
    return is_number(value) and abs(value) <= sys.float_info.max


def is_too_deep(value: object) -> bool:
    """Whether lists and objects of a decoded value are nested deeper than MAX_DEPTH."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, _CONTAINERS)  # of texts and numbers there may be millions
        ]
        if not level:
            return False
    return True
