"""The grammar of an answer that is a value of a JSON schema, or calls of functions in a model's own format, and never both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jdisagg.text.calls.format import ModelFormat
from jdisagg.text.lark import in_a_line

# Blanks in a row within a call: those of a head, in all its places, are fewer than readers hold for one.
_BLANKS = r"[ \n\r\t]{1,32}"


def answer_or_calls(
    answer: str, call_format: ModelFormat, names: Sequence[str], token_of: Callable[[str], int | None], *, in_parallel: bool
) -> str:
    """In Lark. `answer`: the schema, in one line. `names`: of the functions; their arguments are any object. `token_of`: the id
    of a mark that is one token, and so written by models; None = it is letters. Whether the library takes such a token for text
    is its own affair: Qwen's `<tool_call>`, which is none of the special tokens, it does not. With `in_parallel` there may be
    several calls."""

    def mark(text: str) -> str:
        return json.dumps(text) if (token_id := token_of(text)) is None else f"<[{token_id}]>"

    lines = ["start: answer | calls", f"answer: %json {answer}", *call_format.rules(names, mark, in_parallel=in_parallel)]
    blanks: dict[str, Any] = {"x-guidance": {"whitespace_pattern": _BLANKS}}
    arguments = {"type": "object"}
    properties = {"type": {"const": "function"}, "name": {"enum": [*names]}, call_format.arguments_key: arguments}
    call = {"type": "object", "properties": properties, "required": ["name", call_format.arguments_key]}
    lines += [f"call: %json {in_a_line(call | {'additionalProperties': False} | blanks)}", f"BLANKS: /{_BLANKS}/"]
    lines += [f"object: %json {in_a_line(arguments | blanks)}"]
    return "\n".join(lines)
