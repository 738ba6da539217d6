"""What the grammar of calls that are forced writes: `[{"name":"f","parameters":{..}},{"name":"g","parameters":{..}}]`."""

from __future__ import annotations

from jdisagg.text.calls.format import Head, Verdict
from jdisagg.text.calls.objects import look_at_object

_BEGIN = "["


class Forced:
    """See CallFormat; no model has it of its own accord."""

    marks: tuple[str, ...] = (_BEGIN,)
    inner: tuple[str, ...] = ()
    glue: tuple[str, ...] = (",", "]")
    opens_bare = False

    def look(self, held: str, *, is_whole: bool) -> Head | Verdict:
        """See CallFormat."""
        return look_at_object(held.removeprefix(_BEGIN), is_whole=is_whole)
