"""Llama 3.1 to 3.3: the answer is `{"name": "f", "parameters": {..}}`, perhaps several with `;` between them, perhaps behind
`<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jdisagg.text.calls.format import Head, Verdict
from jdisagg.text.calls.objects import MOST_BEGUN, look_at_object

_TAG = "<|python_tag|>"


class Llama3Json:
    """See ModelFormat."""

    marks: tuple[str, ...] = (_TAG,)
    inner: tuple[str, ...] = ()
    glue: tuple[str, ...] = (";",)
    opens_bare = True
    arguments_key = "parameters"

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """See CallFormat."""
        call = held.lstrip()
        if _TAG.startswith(call):
            return Verdict.WAIT if len(held) <= MOST_BEGUN else Verdict.TEXT
        return look_at_object(call.removeprefix(_TAG), is_whole=is_whole)

    def rules(self, names: Sequence[str], mark: Callable[[str], str], *, in_parallel: bool) -> list[str]:
        """See ModelFormat."""
        more = ' (BLANKS? ";" BLANKS? call)*' if in_parallel else ""
        return [f"calls: ({mark(_TAG)} BLANKS?)? call{more}"]
