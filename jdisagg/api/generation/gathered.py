"""Outputs of a request that nobody reads before its end: many become one.

To wake a coroutine for each token, and to make a delta of it, costs the host as much as all that the engine does for it. What
the engine's thread observes, TTFT and inter-token latency, is of single tokens all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from jdisagg.core.errors import RequestError
from jdisagg.core.requests import Output

T = TypeVar("T")

MOST_GATHERED = 32  # outputs that wait for others; their text is made at once
_FEWEST_GATHERED = 17


def gathered_by(num_running: int) -> int:
    """At how many outputs of a request that begins beside `num_running` its reader is woken. Of hundreds that begin together
    not all shall keep the event loop, and those who stream, in the same tick."""
    return MOST_GATHERED - num_running % (MOST_GATHERED - _FEWEST_GATHERED + 1)


def in_one(items: Sequence[Output | RequestError]) -> Output | RequestError:
    """What an answer made of `items`, at least one, would be made of: an error ends it, but for one that came behind its last
    output."""
    outputs = list[Output]()
    for item in items:
        if isinstance(item, RequestError):
            return item
        outputs.append(item)
        if item.finish is not None:
            break
    return outputs[0] if len(outputs) == 1 else _joined(outputs)


def _joined(outputs: Sequence[Output]) -> Output:
    last = outputs[-1]
    scored = [output.logprobs for output in outputs if output.logprobs is not None]
    return replace(
        last,
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(chain.from_iterable(scored)) if scored else None,
        prompt_logprobs=_latest(output.prompt_logprobs for output in outputs),
        cached_tokens=max(output.cached_tokens for output in outputs),
        provenance=_latest(output.provenance for output in outputs),
        fingerprint=_latest(output.fingerprint for output in outputs),
    )


def _latest(values: Iterable[T | None]) -> T | None:
    """Of those that were said."""
    latest = None
    for value in values:
        latest = latest if value is None else value
    return latest
