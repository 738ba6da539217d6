"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {..}}</tool_call>`, with newlines, any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jdisagg.text.calls.format import Head, Verdict
from jdisagg.text.calls.objects import look_at_object

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes:
    """See ModelFormat."""

    marks: tuple[str, ...] = (_BEGIN, _END)
    inner: tuple[str, ...] = ()
    glue: tuple[str, ...] = (_END,)
    opens_bare = False
    arguments_key = "arguments"

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """See CallFormat."""
        return look_at_object(held.removeprefix(_BEGIN), is_whole=is_whole) if held.startswith(_BEGIN) else Verdict.TEXT

    def rules(self, names: Sequence[str], mark: Callable[[str], str], *, in_parallel: bool) -> list[str]:
        """See ModelFormat."""
        more = " (BLANKS? wrapped)*" if in_parallel else ""
        return [f"calls: wrapped{more}", f"wrapped: {mark(_BEGIN)} BLANKS? call BLANKS? {mark(_END)}"]
