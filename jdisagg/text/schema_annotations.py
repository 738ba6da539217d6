"""A JSON schema as llguidance gets it: without what that refuses though it asks for nothing, its unions' tags required.

No answer is of it that was not of the schema as it came, but where `schema_patterns` says so. By JSON Schema (2020-12,
validation, 7.2) a `format` that an implementation does not know is an annotation, `uniqueItems` is an assertion only where it
is true (6.4.3), and names of properties are strings. Bounds that no int64 exceeds, as generators of schemas write them for
floats and integers, tell the type that a client has, and not what an answer is. Null is the value of no keyword but of `const`
and `default`: Go writes it for what is not set. Whatever else llguidance does not know it has to refuse: without it an answer
may be none that was asked for. What it reads amiss `schema_mends` mends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jdisagg.core.json_values import is_number
from jdisagg.text.schema_mends import mended
from jdisagg.text.schema_names import Names
from jdisagg.text.schema_patterns import KNOWN_FORMATS, without_look_around
from jdisagg.text.schema_refs import Root
from jdisagg.text.schema_tags import missing_tags
from jdisagg.text.schema_walk import rebuilt

_BELOW, _ABOVE = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_INT64_MAX = 2**63 - 1  # llguidance makes no expression of numbers from or up to there
_OF_NAMES = ("dependentRequired", "dependentSchemas", "dependencies")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_OF_VALUES = ("const", "default")  # null is one
_SAID_OF_STRINGS = frozenset(("type", "title", "description", "$comment"))


def readable_text(text: str) -> str:
    """`readable` of a schema's text; the same one where that changes nothing, or where it cannot be read."""
    try:
        schema = json.loads(text)
        changed = readable(schema)
        return text if changed == schema else json.dumps(changed, allow_nan=False)
    except (ValueError, RecursionError):  # what is wrong with it the library says
        return text


def readable(schema: Any, looks_left: Iterator[int] | None = None) -> Any:
    """A schema as the library gets it, its keys in their order; what is no schema as it is. What stands elsewhere and is only
    referred to is not looked at. `looks_left`: of `schema_tags.looks`, for one of several."""
    root = Root(schema)
    missing, names, may_overlap = missing_tags(root, looks_left), Names(root), _may_overlap(schema)

    def change(one: dict[str, Any]) -> dict[str, Any]:
        of_any = may_overlap and "anyOf" in one and "anyOf" not in root.through
        served = mended(without_look_around(one, of_any=of_any))
        said = names.listed({key: value for key, value in served.items() if not _says_nothing(key, value, one)})
        return said | {"required": [*said.get("required", []), *missing[id(one)]]} if id(one) in missing else said

    return rebuilt(schema, change)


def _may_overlap(schema: Any) -> bool:
    """Whether branches of a `oneOf` may: else one that takes less would have another take more."""
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    return not isinstance(guidance, dict) or guidance.get("coerce_one_of") is not False


def _says_nothing(key: str, value: Any, beside: dict[str, Any]) -> bool:
    if value is None:
        return key not in _OF_VALUES
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames":
        return value is True or (isinstance(value, dict) and _takes_strings(value))
    if key in _OF_NAMES:
        return value == {}
    if key in _UNEVALUATED:
        return value is True or value == {}
    if key in _BELOW:
        return is_number(value) and value <= -_INT64_MAX
    return key in _ABOVE and is_number(value) and value >= _INT64_MAX and not _is_integer(beside.get("type"))


def _takes_strings(schema: dict[str, Any]) -> bool:
    return schema.keys() <= _SAID_OF_STRINGS and schema.get("type", "string") == "string"


def _is_integer(kind: Any) -> bool:
    """Whether no number but an integer has that type: of those llguidance knows every maximum."""
    return "integer" in kind and "number" not in kind if isinstance(kind, list) else kind == "integer"
