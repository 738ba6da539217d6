"""Whether what P says is the first token, or the end, of a request can be: a P that is broken must not speak to clients.

D knows as much of a request as P does: how many tokens it has left, which of them end it, and what is to be told with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.requests import EngineRequest, FinishReason, Output, TokenLogprob
from jdisagg.sched.stops import find_stop, stop_ids

_GOES_ON = (None, None)


def objection(first: Output, request: EngineRequest, vocab_size: int, eos_token_ids: tuple[int, ...]) -> str | None:
    """What is wrong with it, in words that follow "Done"; None when it can be told."""
    token_ids, goes_on = first.token_ids, request.remaining_tokens > 1
    if first.finish is None and not (token_ids and goes_on):
        return "without a token, or without finish on the last one"
    if len(token_ids) > 1:  # KV of those before the last is nowhere
        return f"with {len(token_ids)} tokens, wanted one at most"
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return f"with token {token_id}, wanted one of [0, {vocab_size})"
    if first.finish in (FinishReason.ERROR, FinishReason.ABORT):
        return f"with finish {first.finish.value!r}, and without an error"
    if first.finish is FinishReason.LENGTH and goes_on:
        return f"with finish 'length', {request.remaining_tokens} tokens before it"
    if bool(token_ids) is not (request.remaining_tokens > 0):
        return f"with {len(token_ids)} tokens, wanted {min(1, request.remaining_tokens)}"
    told, stops = (first.finish, first.stop_token_id), stop_ids(request.sampling, eos_token_ids)
    for token_id in token_ids:
        due = find_stop(token_id, len(request.generated_token_ids) + 1, request.sampling, stops) or _GOES_ON
        if told != due:
            return f"with token {token_id} and {_named(told)}, wanted {_named(due)}"
    return _misfit("logprobs", first.logprobs, token_ids if request.sampling.logprobs is not None else ()) or _misfit(
        "prompt_logprobs", first.prompt_logprobs, _scored_prompt(request)
    )


def _named(end: tuple[FinishReason | None, int | None]) -> str:
    finish, stop_token_id = end
    named = "no finish" if finish is None else f"finish {finish.value!r}"
    return named if stop_token_id is None else f"{named} by token {stop_token_id}"


def _scored_prompt(request: EngineRequest) -> tuple[int, ...]:
    """Prompt tokens whose log-probabilities come with the first token; a resumed request has told them."""
    wanted = request.sampling.prompt_logprobs is not None and not request.generated_token_ids
    return request.prompt_token_ids if wanted else ()


def _misfit(name: str, scores: Sequence[TokenLogprob | None] | None, token_ids: Sequence[int]) -> str | None:
    """The edge counts on one score for each token that it asked to have scored. Nothing predicts a prompt's first one."""
    if len(scores or ()) != len(token_ids):
        return f"with {len(scores or ())} {name}, wanted {len(token_ids)}"
    for index, (score, token_id) in enumerate(zip(scores or (), token_ids, strict=True)):
        if score is None and (index or name == "logprobs"):
            return f"without {name} of token {index}"
        if score is not None and score.token_id != token_id:
            return f"with {name} of token {score.token_id}, wanted those of {token_id}"
    return None
