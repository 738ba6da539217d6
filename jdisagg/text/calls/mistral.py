"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {..}}, ..]`, and since 2025 `[TOOL_CALLS]f[ARGS]{..}`, with `[CALL_ID]..`
behind the name or not, for each call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jdisagg.text.calls.format import Head, Verdict
from jdisagg.text.calls.objects import look_at_object

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*\{")
_BARE = re.compile(r"[a-zA-Z0-9_.-]{1,64}")  # a name that stands before its arguments
_MOST_BEGUN = 256  # characters of names and marks
_BEGUN = re.compile(r"\s*+[\w.-]*+\s*+(?:\[[A-Z_]*+(?:\]\w*+)?+)*+\s*+")  # nothing is tried twice: that took ages


class Mistral:
    """See ModelFormat."""

    marks: tuple[str, ...] = (_BEGIN,)
    inner: tuple[str, ...] = (_ID, _ARGUMENTS)
    glue: tuple[str, ...] = (",", "]")
    opens_bare = False
    arguments_key = "arguments"

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """See CallFormat."""
        if held.startswith("{"):
            return look_at_object(held, is_whole=is_whole)
        if not held.startswith(_BEGIN):
            return Verdict.TEXT
        rest = held.removeprefix(_BEGIN)
        if rest.lstrip().startswith("["):
            return look_at_object(rest.lstrip()[1:], is_whole=is_whole)
        if head := _NAMED.fullmatch(rest):
            return Head(head[1], is_wrapped=False)
        return Verdict.WAIT if len(rest) <= _MOST_BEGUN and _BEGUN.fullmatch(rest) else Verdict.TEXT

    def rules(self, names: Sequence[str], mark: Callable[[str], str], *, in_parallel: bool) -> list[str]:
        """See ModelFormat."""
        more, again = (' (BLANKS? "," BLANKS? call)*', "+") if in_parallel else ("", "")
        begin, listed = mark(_BEGIN), f'BLANKS? "[" BLANKS? call{more} BLANKS? "]"'
        bare = [name.replace(".", r"\.") for name in names if _BARE.fullmatch(name)]
        if not bare:
            return [f"calls: {begin} {listed}"]
        behind = f"({mark(_ID)} /[a-zA-Z0-9]{{1,32}}/)? {mark(_ARGUMENTS)}? BLANKS? object"
        return [f"calls: {begin} {listed} | named{again}", f"named: {begin} BLANKS? /{'|'.join(bare)}/ {behind}"]
