"""What a JSON schema tells its readers and no validator (2020-12, core, 8.3, and validation, 9): of the schemas of tools it is
the larger part."""

from __future__ import annotations

from typing import Any

from jdisagg.text.schema_refs import Root, values_in
from jdisagg.text.schema_walk import rebuilt

COMMENTS = frozenset(("title", "description", "default", "examples", "$comment"))


class _TooLong(Exception):
    pass


def uncommented(schemas: list[Any], most_bytes: int) -> list[Any]:
    """Each without its comments, unless one of its references may lead into these. All as they are where they have more than
    `most_bytes` in any case: of more it does not look at much."""
    left = most_bytes

    def change(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal left
        said = {key: value for key, value in one.items() if key not in COMMENTS}
        left -= len(said) + sum(len(value) for value in said.values() if isinstance(value, (dict, list)))
        if left < 0:  # it is no less than that
            raise _TooLong
        return said

    try:
        changed = [rebuilt(one, change) for one in schemas]
    except _TooLong:
        return schemas
    for one in values_in(changed):
        most_bytes -= 1 + (len(one) if isinstance(one, str) else 0)
        if most_bytes < 0:  # a reference may be long, too
            return schemas
    return [two if Root(two).through.isdisjoint(COMMENTS) else one for one, two in zip(schemas, changed, strict=True)]
