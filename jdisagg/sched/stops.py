"""Token-level ends of a sequence: EOS, stop ids, max_tokens. (Stop strings are text: the edge finds them and cancels.)"""

from __future__ import annotations

from jdisagg.core.requests import FinishReason, SamplingParams

Stop = tuple[FinishReason, int | None]  # reason, and the EOS / stop id that ended it


def find_stop(token_id: int, num_generated: int, sampling: SamplingParams, stops: frozenset[int]) -> Stop | None:
    """Does `token_id`, the `num_generated`-th token of its sequence, end it? Of `stops`, its `stop_ids`, none does below
    min_tokens."""
    if token_id in stops and num_generated >= sampling.min_tokens:
        return FinishReason.STOP, token_id
    if num_generated >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None


def stop_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Tokens that may end the sequence; whether one does is `find_stop`'s to say."""
    return frozenset(sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids))
