"""Where the references of a JSON schema lead: what they may lead through has to stay where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_PLACES = ("$id", "$anchor", "$dynamicAnchor")  # of a schema within another: what is referred to may be told from there


@dataclass(frozen=True, slots=True)
class References:
    """`through`: whatever stands between the slashes of one, keywords and names. `has_places`: within the schema are others
    with names of their own, so that a reference may mean something else than where it leads to from the root."""

    through: frozenset[str]
    has_places: bool


def read_references(schema: Any) -> References:
    """Of everything in it, whether it is a schema or only looks like one."""
    through, has_places = set[str](), False
    for one in values_in(schema):
        if isinstance(one, dict):
            if isinstance(reference := one.get("$ref"), str):
                through.update(re.split("[/#]", unquote(reference)))
            has_places |= one is not schema and any(isinstance(one.get(name), str) for name in _PLACES)
    return References(frozenset(through), has_places)


def values_in(value: Any) -> Iterator[Any]:
    """It and all within it."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
