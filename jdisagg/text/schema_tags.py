"""Tags of unions in a JSON schema: the property by which a reader knows of which branch an object is.

OpenAPI (3.1, `discriminator`) has a union's `oneOf` or `anyOf` name it, and says that objects have it. Where pydantic has a
default for a tag, its branches do not require it: an answer without one would be of the schema, and pydantic could not read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jdisagg.text.schema_refs import Root
from jdisagg.text.schema_walk import schemas_in

_UNIONS = ("oneOf", "anyOf")
_NESTED = (*_UNIONS, "allOf")  # what a branch may be made of
_MOST_LOOKED_AT = 2**14  # branches and what they are made of, in all unions, which may share theirs: 20 ms


def looks() -> Iterator[int]:
    """One for each that may be looked at, in all schemas that it is given for."""
    return iter(range(_MOST_LOOKED_AT))


def missing_tags(root: Root, left: Iterator[int] | None = None) -> dict[int, list[str]]:
    """By the `id` of a branch, wherever it stands in the schema, the tags that it has and does not require. `left`: of `looks`,
    where others have taken some."""
    asked: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for (one, tag), _ in zip(_tagged(root), looks() if left is None else left, strict=False):
        if isinstance(one, dict):
            asked.setdefault(id(one), (one, set()))[1].add(tag)
    return {place: missing for place, (branch, tags) in asked.items() if (missing := _missing(branch, tags))}


def _tagged(root: Root) -> Iterator[tuple[Any, str]]:
    """Branches, each with the tag of a union that it is of, and whatever else was looked at."""
    for union in schemas_in(root.schema):
        match union.get("discriminator"):
            case {"propertyName": str(tag)}:
                yield from ((branch, tag) for name in _UNIONS for branch in _branches(union.get(name), root))


def _branches(union: Any, root: Root) -> Iterator[Any]:
    """All of them, what those are made of, and whatever else stands there."""
    left, seen = [union], set[int]()
    while left:
        one = left.pop()
        yield one
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            left += (one[name] for name in _NESTED if name in one)
            if isinstance(reference := one.get("$ref"), str):
                left.append(root.refer(reference))


def _missing(branch: dict[str, Any], tags: set[str]) -> list[str]:
    properties, required = branch.get("properties"), branch.get("required")
    required = [] if required is None else required
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    return sorted((tags & properties.keys()) - {name for name in required if isinstance(name, str)})
