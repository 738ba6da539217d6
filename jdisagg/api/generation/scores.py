"""How many log-probabilities one request may ask for: a router holds them all until an answer that does not stream is written.

A scored token with k alternatives takes 550 to 650 bytes times (k + 2), most of them while its JSON is made: 1.1 KB with none,
14 KB and 0.1 ms with 20. So MAX_SCORES are 1.9 GiB and half a minute; one prompt of 128k tokens with 20 alternatives is 2.9
million of them, and passes.
"""

from __future__ import annotations

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import SamplingParams

MAX_SCORES = 3 * 2**20
_HOW = f"at most {MAX_SCORES} scores per request, which are its scored tokens times (alternatives + 2)"


def check_prompt_scores(num_tokens: int, n: int, sampling: SamplingParams) -> None:
    """`num_tokens`: of all prompts so far, each of which is scored for each of its `n` choices. Raises InvalidRequest."""
    num = num_tokens * n * _weight(sampling.prompt_logprobs)
    if num > MAX_SCORES:
        advice = "send fewer prompts, or ask for fewer alternatives"
        raise InvalidRequest.of("prompt_logprobs", f"{_HOW}; got {num}, {advice}")


def most_answer_tokens(num_prompt_tokens: int, num_prompts: int, n: int, sampling: SamplingParams) -> int | None:
    """Tokens that each choice may have before all the scores are too many, at least 1; None: they are not scored."""
    if not (weight := _weight(sampling.logprobs)):
        return None
    left = MAX_SCORES - num_prompt_tokens * n * _weight(sampling.prompt_logprobs)
    return max(1, left // (num_prompts * n * weight))


def too_many_answer_scores(max_tokens: int, most_tokens: int) -> InvalidRequest:
    """The error of a request whose `max_tokens` are more than `most_answer_tokens`."""
    advice = f"max_tokens may be {most_tokens} for so many choices and prompts; got {max_tokens}"
    return InvalidRequest.of("logprobs", f"{_HOW}; {advice}, lower max_tokens or n")


def _weight(num_alternatives: int | None) -> int:
    return 0 if num_alternatives is None else num_alternatives + 2
