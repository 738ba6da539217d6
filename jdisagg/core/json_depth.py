"""How deep JSON may be nested."""

from __future__ import annotations

MAX_DEPTH = 200  # Python gives up near 1000 levels, less what is on its stack and what is wrapped around a value


def deeper_than(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects of a decoded value are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit + 1):
        containers = [node for node in level if isinstance(node, dict | list)]
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return False
    return True
