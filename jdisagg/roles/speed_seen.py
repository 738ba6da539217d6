"""How fast this prefill worker computes prompts, by its latest steps at their beginnings."""

from __future__ import annotations

from collections import deque
from statistics import median

from jdisagg.core.speed import Speed

LATEST = 5  # steps; of these two may have been held up
FEW = 3  # of fewer nothing is said
DEEP = 2048  # tokens of a prompt behind so many read so much KV that they tell how long it is, not how fast the worker is
OLD_S = 60.0  # what was seen before says nothing any more: a worker that nobody asks, as it was slow, is asked again


class SpeedSeen:
    """Of steps that compute prompts and nothing else."""

    def __init__(self, full_tokens: int) -> None:
        """`full_tokens`: that one step computes at most."""
        self._full_tokens = full_tokens
        self._steps = deque[tuple[float, float, int]](maxlen=LATEST)  # when it ended, seconds, tokens

    def add(self, num_tokens: int, step_s: float, now_s: float, *, deepest: int = 0) -> None:
        """A step has ended; `deepest`: tokens before those of one prompt, at most."""
        if step_s > 0.0 and deepest < DEEP:
            self._steps.append((now_s, step_s, num_tokens))

    def told(self, now_s: float) -> Speed | None:
        """As of now. A full step takes no less time than one that is not, and a token of it no more."""
        while self._steps and now_s - self._steps[0][0] > OLD_S:
            self._steps.popleft()
        if len(self._steps) < FEW:
            return None
        least = median(num_tokens / step_s for _, step_s, num_tokens in self._steps)
        return Speed(least, max(least, median(self._full_tokens / step_s for _, step_s, _ in self._steps)))
