"""Where the references of a JSON schema lead: what they may lead through has to stay where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, cached_property, partial
from typing import Any
from urllib.parse import unquote

_PLACES = ("$id", "$anchor", "$dynamicAnchor")  # of a schema within another: what is referred to may be told from there


class Root:
    """A schema, and the references of everything in it, whether that is a schema or only looks like one. They may be long: what
    is asked for is read once."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.refer = cache(partial(_referred, schema))

    @cached_property
    def through(self) -> frozenset[str]:
        """Whatever stands between the slashes of one, keywords and names."""
        references = (one.get("$ref") for one in values_in(self.schema) if isinstance(one, dict))
        told = (unquote(reference) for reference in references if isinstance(reference, str))
        return frozenset(part for reference in told for part in re.split("[/#]", reference))

    @cached_property
    def has_places(self) -> bool:
        """Whether there are others in it with names of their own, so that a reference may mean something else than where it
        leads to from here."""
        inner = (one for one in values_in(self.schema) if isinstance(one, dict) and one is not self.schema)
        return any(isinstance(one.get(name), str) for one in inner for name in _PLACES)


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


def _referred(root: Any, reference: str) -> dict[str, Any] | None:
    """The object to which a JSON pointer (RFC 6901) into this document leads, by names; None where there is none."""
    if not reference.startswith("#/"):
        return None
    found = root
    for name in unquote(reference).split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None  # a list would be looked through as often as it is referred to
