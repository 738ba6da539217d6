"""What the host makes of the arrays of a step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from jdisagg.engine.packing import Packed
from jdisagg.engine.results import Part, read
from jdisagg.engine.sampler import Logprobs, Sampling
from jdisagg.engine.steps import StepOut


def step(token: int, *, bad: bool = False) -> Part:
    """A decode step of slot 3, which wants the log-probability of its token."""
    chosen = np.array([-0.5 * token], np.float32)
    logprobs = Logprobs(chosen=chosen, top_ids=np.zeros((1, 2), np.int32), top=np.zeros((1, 2), np.float32))
    sampling = Sampling(tokens=np.array([token]), bad=np.array([bad]), logprobs=logprobs)
    return Part(Packed(np.array([3]), ((0, 3),)), StepOut(sampling, ()), {3: 0})


def test_tokens_of_several_steps_end_with_the_first_bad_one() -> None:
    (sampled,), _ = read([step(5), step(6), step(7, bad=True), step(8), step(9, bad=True)], 2)
    assert sampled.token_ids == (5, 6, 7)
    assert sampled.logprobs is not None
    assert [one.logprob for one in sampled.logprobs] == [-2.5, -3.0]
    assert "NaN (step 2, slot 3)" in str(sampled.bad)


def test_tokens_of_healthy_steps_are_joined() -> None:
    (sampled,), _ = read([step(5), step(6)], 2)
    assert (sampled.token_ids, sampled.bad) == ((5, 6), None)
    assert sampled.logprobs is not None
    assert [one.token_id for one in sampled.logprobs] == [5, 6]


class Waited:
    """An array of a step under way."""

    def __init__(self) -> None:
        self.is_ready = False

    def block_until_ready(self) -> Waited:
        self.is_ready = True
        return self


def test_a_step_of_which_nothing_is_read_is_waited_for_all_the_same() -> None:
    """Else the host would dispatch a long prompt to its end, and KV of its first chunk could not be read before its last."""
    tokens, scores = Waited(), Waited()
    sampling = Sampling(tokens=cast(Any, tokens), bad=cast(Any, None), logprobs=cast(Any, None))
    part = Part(Packed(None, ()), StepOut(sampling, cast(Any, (scores,))), {})
    assert read([part], 1) == ((), {})
    assert (tokens.is_ready, scores.is_ready) == (True, True)
