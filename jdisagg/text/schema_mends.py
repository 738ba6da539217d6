r"""What llguidance 1.9.1 reads otherwise than a JSON schema means it, written so that it cannot.

In a pattern, a class that has all control characters, as [^"] has, gets the escapes \" and \\ with them, though it may exclude
these two characters: a class that does gives up \r, which hardly anybody writes. Of 0 < x <= 0.5, whose bounds have one integer
part, the excluded bound is let in: it is moved by 1e-9. Not looked at: schemas within a Lark grammar that a client writes.
"""

from __future__ import annotations

import math
import re
from typing import Any

from jdisagg.core.json_values import is_number

_NUDGE = 1e-9
_MENDED = "&&[^\\r]]"  # behind a class, with another bracket before it: but for a carriage return
# Ranges of letters or digits, characters that mean themselves, and escapes, none of which is one of the two.
_PLAIN = re.compile(
    r"\[\^?-?(?:[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[a-zA-Z0-9 _.,:;@#%+*/()<>=!?$'`{}|]|\\[dDwWsSnrt./+*?()|{}\-$])+-?\]"
)
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def mended(schema: dict[str, Any]) -> dict[str, Any]:
    """One schema of its kind, without those within it; the same one where nothing is to be done."""
    changed = schema
    if isinstance(pattern := schema.get("pattern"), str):
        changed = {**changed, "pattern": mended_pattern(pattern)}
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        changed = {**changed, "patternProperties": {mended_pattern(name): one for name, one in by_pattern.items()}}
    if "integer" not in _types(schema):
        changed = _with_bounds(_with_bounds(changed, _LOWEST, _HIGHEST, 1), _HIGHEST, _LOWEST, -1)
    return changed


def mended_pattern(pattern: str) -> str:
    """A regular expression whose classes take no quote and no backslash that they exclude; of one that is mended, itself."""
    parts = parts_of(pattern)
    if parts is None:  # what is wrong with it the library says
        return pattern
    return "".join(f"[{part}{_MENDED}" if _may_leak(part) else part for part in parts)


def parts_of(pattern: str) -> list[str] | None:
    """Its characters, escapes and classes, one by one; None: one of them has no end."""
    parts, at = list[str](), 0
    while at < len(pattern):
        end = _end_of_part(pattern, at)
        if end is None:
            return None
        parts.append(pattern[at:end])
        at = end
    return parts


def _may_leak(part: str) -> bool:
    """Whether it is a class that is not plainly one with both characters, or without most control characters."""
    if part[0] == "[":
        return _PLAIN.fullmatch(part) is None and not part.endswith(_MENDED)
    return part[0] == "\\" and part[1:2] in ("p", "P")


def _end_of_part(pattern: str, begin: int) -> int | None:
    if pattern[begin] == "[":
        return _end_of_class(pattern, begin)
    if pattern.startswith(("\\p{", "\\P{"), begin):
        return pattern.find("}", begin) + 1 or None
    return begin + 1 + (pattern[begin] == "\\") + (pattern[begin : begin + 2] in ("\\p", "\\P"))


def _end_of_class(pattern: str, begin: int) -> int | None:
    """Behind the class that begins there; a class may have others in it. None: it has no end."""
    depth, at = 0, begin
    while at < len(pattern):
        if pattern[at] == "[":
            depth += 1
            at += 1 + pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at)  # the first is a character
            continue
        if pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1 + (pattern[at] == "\\")
    return None


def _types(schema: dict[str, Any]) -> tuple[Any, ...]:
    of_type = schema.get("type")
    return tuple(of_type) if isinstance(of_type, list) else (of_type,)


def _with_bounds(schema: dict[str, Any], ours: tuple[str, str], others: tuple[str, str], sign: int) -> dict[str, Any]:
    """`ours` are the names of the bound that may be excluded, `others` of the one on the other side, which lies on that of
    `sign`."""
    included, excluded = ours
    bound = _number(schema.get(excluded))
    inner = [value for name in others if (value := _number(schema.get(name))) is not None]
    if bound is None or not any(math.trunc(value) == bound for value in inner):
        return schema
    room = min(sign * (value - bound) for value in inner)
    if room <= 0:  # there is no such number, which the library says
        return schema
    moved = bound + sign * min(_NUDGE, room / 2)
    if moved == bound:
        moved = math.nextafter(bound, sign * math.inf)
    given = _number(schema.get(included))
    tighter = moved if given is None else sign * max(sign * moved, sign * given)
    return {key: value for key, value in schema.items() if key != excluded} | {included: tighter}


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) and abs(value) < 2**53 else None
