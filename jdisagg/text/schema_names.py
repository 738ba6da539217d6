"""Objects of a JSON schema whose `propertyNames` lists all names that there may be, as those of dict[Enum, X] and
z.record(z.enum(..), X) do: they have these properties, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jdisagg.text.schema_comments import COMMENTS
from jdisagg.text.schema_refs import References

_MOST_NAMES = 120  # as many may be optional: see docs/operations.md
_MOST_COPIED = 2**15  # bytes of schemas in one schema, each written once for every name
_MOST_STEPS = 8  # from one reference to the next


class Names:
    """Of one schema and all within it, which share a bound. `refer`: to where a reference leads from the root."""

    def __init__(self, references: Callable[[], References], refer: Callable[[str], Any]) -> None:
        self._references = references
        self._refer = refer
        self._left = _MOST_COPIED

    def listed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The same objects, by `properties` alone; the same schema where it says otherwise, or that could not be exact."""
        names = self._names(schema.get("propertyNames"))
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not names or len(names) > _MOST_NAMES or schema.get("patternProperties"):
            return schema
        if not isinstance(properties, dict) or not properties.keys() <= names.keys() or not isinstance(others, (dict, bool)):
            return schema
        more = {} if others is False else dict.fromkeys(name for name in names if name not in properties)
        if self._is_referred_to() or not self._has_room(others, len(more) - 1):
            return schema
        listed = {"properties": {**properties, **dict.fromkeys(more, others)}, "additionalProperties": False}
        return {key: value for key, value in schema.items() if key != "propertyNames"} | listed

    def _names(self, said: Any) -> dict[str, None] | None:
        """Those that are of such a schema, in its order; None: it does not list them."""
        for _ in range(_MOST_STEPS):
            match {key: value for key, value in said.items() if key not in COMMENTS} if isinstance(said, dict) else None:
                case {"$ref": str(reference), **others} if not others:
                    said = self._refer(reference)
                case {"enum": list(listed), **others} if others in ({}, {"type": "string"}):
                    return dict.fromkeys(name for name in listed if isinstance(name, str))
                case {"const": str(name), **others} if others in ({}, {"type": "string"}):
                    return {name: None}
                case _:
                    return None
        return None

    def _is_referred_to(self) -> bool:
        references = self._references()
        return references.has_places or not references.through.isdisjoint(("propertyNames", "additionalProperties"))

    def _has_room(self, others: Any, num_copies: int) -> bool:
        if self._left >= 0 and num_copies > 0 and isinstance(others, dict):
            self._left -= num_copies * len(json.dumps(others))
        return self._left >= 0
