"""What was said last of a few: a table that forgets what is old, so that no caller fills the memory."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(latest: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Put it last, whether or not it is there; beyond `most` the first is forgotten."""
    latest.pop(key, None)
    latest[key] = value
    if len(latest) > most:
        del latest[next(iter(latest))]
