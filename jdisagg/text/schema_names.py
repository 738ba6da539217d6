"""Objects of a JSON schema whose `propertyNames` lists all names that there may be, as those of dict[Enum, X] and
z.record(z.enum(..), X) do: they have these properties, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jdisagg.text.schema_comments import COMMENTS
from jdisagg.text.schema_refs import Root

_MOST_NAMES = 120  # as many may be optional: see docs/api.md
_MOST_COPIED = 2**15  # bytes in one schema: of names, and of schemas that are each written once for every name
_MOST_KEYS = len(COMMENTS) + 2  # of a schema that lists names
_MOST_STEPS = 8  # from one reference to the next


class Names:
    """Of one schema and all within it, which share a bound."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._left = _MOST_COPIED

    def listed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The same objects, by `properties` alone; the same schema where it says otherwise, or that could not be exact."""
        names = self._names(schema.get("propertyNames"))
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not names or schema.get("patternProperties"):
            return schema
        if not isinstance(properties, dict) or not properties.keys() <= names.keys() or not isinstance(others, (dict, bool)):
            return schema
        more = {} if others is False else dict.fromkeys(name for name in names if name not in properties)
        if self._is_referred_to() or not self._has_room(names, others, len(more) - 1):
            return schema
        listed = {"properties": {**properties, **dict.fromkeys(more, others)}, "additionalProperties": False}
        return {key: value for key, value in schema.items() if key != "propertyNames"} | listed

    def _names(self, said: Any) -> dict[str, None] | None:
        """Those that are of such a schema, in its order; None: it does not list them."""
        for _ in range(_MOST_STEPS):
            if isinstance(said, dict) and len(said) > _MOST_KEYS:
                return None
            match {key: value for key, value in said.items() if key not in COMMENTS} if isinstance(said, dict) else None:
                case {"$ref": str(reference), **others} if not others:
                    said = self._root.refer(reference)
                case {"enum": list(listed), **others} if others in ({}, {"type": "string"}) and len(listed) <= _MOST_NAMES:
                    return dict.fromkeys(name for name in listed if isinstance(name, str))
                case {"const": str(name), **others} if others in ({}, {"type": "string"}):
                    return {name: None}
                case _:
                    return None
        return None

    def _is_referred_to(self) -> bool:
        return self._root.has_places or not self._root.through.isdisjoint(("propertyNames", "additionalProperties"))

    def _has_room(self, names: Iterable[str], others: Any, num_copies: int) -> bool:
        if self._left >= 0:
            self._left -= sum(map(len, names))  # of an enum that others may refer to as well
            if num_copies > 0 and isinstance(others, dict):
                self._left -= num_copies * len(json.dumps(others))
        return self._left >= 0
