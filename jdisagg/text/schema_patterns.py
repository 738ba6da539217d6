"""Patterns of a JSON schema with look-around, which no grammar is made of, where one can be done without.

zod writes such a pattern beside the `format` that it is of (`email`, `hostname`, `duration`): the format alone counts then. Of
an `anyOf`, as pydantic has it of a Decimal, `[{"type": "number"}, {"type": "string", "pattern": "^(?!..)"}]`, the branches
without one are left.
"""

from __future__ import annotations

import re
from typing import Any

from jdisagg.text.schema_mends import parts_of

# `lookup_format` of llguidance 1.9.1 (parser/src/json/formats.rs).
KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_OF_ANY_TEXT = "unknown"  # of those
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_WITH_REMARKS = re.compile(r"\(\?[a-zA-Z]*x")  # a flag that JavaScript has not: what follows may be no expression


def without_look_around(schema: dict[str, Any], *, of_any: bool) -> dict[str, Any]:
    """One schema, without those within it; the same one where nothing is to be done. `of_any`: branches may be left out."""
    if has_look_around(schema.get("pattern")) and _has_format(schema):
        schema = {key: value for key, value in schema.items() if key != "pattern"}
    if of_any and isinstance(branches := schema.get("anyOf"), list):
        left = [one for one in branches if not _is_unserved(one)]
        if len(left) < len(branches) and any(not _is_nothing(one) for one in left):
            return {**schema, "anyOf": left}
    return schema


def has_look_around(pattern: Any) -> bool:
    """False of what is no expression at all: what is wrong with it the library says."""
    if not isinstance(pattern, str) or not _LOOK_AROUND.search(pattern) or _WITH_REMARKS.search(pattern):
        return False
    at = 0
    for part in parts_of(pattern) or ():
        if _LOOK_AROUND.match(pattern, at):
            return True
        at += len(part)
    return False


def _is_unserved(branch: Any) -> bool:
    return isinstance(branch, dict) and has_look_around(branch.get("pattern")) and not _has_format(branch)


def _has_format(schema: dict[str, Any]) -> bool:
    form = schema.get("format")
    return isinstance(form, str) and form in KNOWN_FORMATS and form != _OF_ANY_TEXT


def _is_nothing(branch: Any) -> bool:
    """An answer of null alone says nothing: who asks for more is better told."""
    return branch is False or (isinstance(branch, dict) and branch.get("type") == "null") or branch == {"const": None}
