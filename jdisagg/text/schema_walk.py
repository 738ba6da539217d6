"""The schemas within a JSON schema, of all drafts; what only looks like one, in a `const` or an `enum`, is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Keywords whose value is a schema or a list of some, and those whose value has them by names.
_OF_SCHEMAS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"),
        *("unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """It and all within it, each after the one around it. What stands elsewhere and is only referred to is not among them."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            yield one
            for key, value in one.items():
                if key in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif key in _OF_SCHEMAS:
                    left.append(value)


def rebuilt(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """What `change` makes of each of them, keys in its order; what is no schema as it is. `change` gets those that are in
    `schema`, not copies."""
    if not isinstance(schema, dict):
        return schema
    return {key: _inner(key, value, change) for key, value in change(schema).items()}


def _inner(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: rebuilt(one, change) for name, one in value.items()}
    if key in _OF_SCHEMAS:
        return [rebuilt(one, change) for one in value] if isinstance(value, list) else rebuilt(value, change)
    return value
