"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {..}}</tool_call>`, with newlines, any number of them."""

from __future__ import annotations

from jdisagg.text.calls.format import Head, Verdict
from jdisagg.text.calls.objects import look_at_object

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes:
    """See CallFormat."""

    marks: tuple[str, ...] = (_BEGIN, _END)
    inner: tuple[str, ...] = ()
    glue: tuple[str, ...] = (_END,)
    opens_bare = False

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """See CallFormat."""
        return look_at_object(held.removeprefix(_BEGIN), is_whole=is_whole) if held.startswith(_BEGIN) else Verdict.TEXT
