"""W3C trace context: the `traceparent` of a client's call is carried along to every worker and logged with the request's id.

Format: https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re

TRACEPARENT = "traceparent"  # HTTP header and gRPC metadata key

_VERSION_0 = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST = 256  # characters; later versions may append fields


def read_traceparent(value: str | None) -> str:
    """The value when it is valid, else "": the standard wants a broken one ignored, not answered with an error."""
    if value is None or len(value) > _LONGEST:
        return ""
    value = value.strip()
    match = _VERSION_0.match(value)
    if match is None:
        return ""
    rest = value[match.end() :]
    if rest and (match[1] == "00" or not re.fullmatch(r"-[\x21-\x7e]*", rest)):
        return ""
    return value
