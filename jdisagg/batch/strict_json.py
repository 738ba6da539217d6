"""JSON that any reader takes: what a line or a server says is checked before it can reach the journal or the output.

Python's own reader takes more than JSON (NaN, half a surrogate pair, nesting that its writer then cannot follow).
"""

from __future__ import annotations

import json
from typing import Any

from jdisagg.core.json_values import MAX_DEPTH, is_too_deep


def decode(raw: bytes) -> Any:
    """The value of `raw`, UTF-8. Raises ValueError when it is no JSON or nested too deep to tell; see `flaw` for the rest."""
    try:
        return json.loads(raw.decode("utf-8-sig", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None


def flaw(value: object) -> str | None:
    """Why a decoded value cannot be written as JSON in UTF-8 again; None when it can."""
    if is_too_deep(value):
        return f"nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair (\\ud800 to \\udfff alone), which no text has"
    except ValueError:
        return "it holds a number that JSON does not have (NaN, Infinity, or beyond 1e308)"
    return None


def encode(value: object) -> bytes:
    """`value` on one line. Half a surrogate pair stays the escape that it was; NaN is the caller's to keep out."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")
