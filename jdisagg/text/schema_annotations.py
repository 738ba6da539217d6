"""What llguidance refuses in a JSON schema though it asks for nothing: annotations, left out before it compiles the rest.

By JSON Schema (2020-12, validation, 7.2) a `format` that an implementation does not know is an annotation, and `uniqueItems` is
an assertion only where it is true (6.4.3). Whatever else llguidance does not know it has to refuse: without it an answer may be
none that was asked for.

On the way each schema is mended, see `schema_mends`.
"""

from __future__ import annotations

import json
from typing import Any

from jdisagg.text.schema_mends import SIGNS as MENDED
from jdisagg.text.schema_mends import mended

# `lookup_format` of llguidance 1.9.1 (parser/src/json/formats.rs).
KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)

# Keywords whose value is a schema or a list of some, and those whose value has them by names; the schemas of all drafts.
_OF_SCHEMAS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"),
        *("unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
_SIGNS = ('"format"', '"uniqueItems"', *MENDED)


def bare_text(text: str) -> str:
    """A schema's text without them; the same one where there are none, or where it cannot be read."""
    if not any(sign in text for sign in _SIGNS):
        return text
    try:
        schema = json.loads(text)
        bare = without_annotations(schema)
        return text if bare == schema else json.dumps(bare, allow_nan=False)
    except (ValueError, RecursionError):  # what is wrong with it the library says
        return text


def without_annotations(schema: Any) -> Any:
    """A schema without them, its keys in their order; what is no schema as it is. What stands elsewhere and is only referred to
    is not looked at."""
    if not isinstance(schema, dict):
        return schema
    return {key: _inner(key, value) for key, value in mended(schema).items() if not _says_nothing(key, value)}


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    return key == "uniqueItems" and value is False


def _inner(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: without_annotations(one) for name, one in value.items()}
    if key in _OF_SCHEMAS:
        return [without_annotations(one) for one in value] if isinstance(value, list) else without_annotations(value)
    return value
