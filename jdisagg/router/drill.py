"""Late outputs on purpose: what an old attempt said comes once more when a newer one has begun to answer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from jdisagg.core.drill import Drill
from jdisagg.core.latest import remember
from jdisagg.core.requests import Output

log = logging.getLogger(__name__)

MOST_REMEMBERED = 1024  # requests whose last output may come again
Deliver = Callable[[list[Output]], None]


def with_late_outputs(deliver: Deliver, drill: Drill) -> Deliver:
    """`deliver`, or one that repeats outputs of replaced attempts: under their own number or, with `attempts_ignored`, as if
    attempts had none."""
    if not (drill.has("late_output") or drill.has("attempts_ignored")):
        return deliver
    return _LateOutputs(deliver, renumber=drill.has("attempts_ignored"))


class _LateOutputs:
    def __init__(self, deliver: Deliver, *, renumber: bool) -> None:
        self._deliver = deliver
        self._renumber = renumber
        self._last: dict[str, Output] = {}  # tokens an attempt brought last, by request

    def __call__(self, outputs: list[Output]) -> None:
        for output in outputs:
            earlier = self._last.get(output.request_id)
            if earlier is not None and earlier.attempt < output.attempt:
                log.info("injected fault: late_output")
                self._deliver([dataclasses.replace(earlier, attempt=output.attempt) if self._renumber else earlier])
            if output.token_ids and output.finish is None:
                remember(self._last, output.request_id, output, MOST_REMEMBERED)
            else:
                self._last.pop(output.request_id, None)
            self._deliver([output])
