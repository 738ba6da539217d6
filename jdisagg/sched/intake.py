"""What a worker can ever serve, checked before a request costs anything."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.config import LEAST_MODEL_LEN, SchedulerConfig
from jdisagg.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from jdisagg.core.requests import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, EngineRequest, Role

_MAX_INT32 = 2**31 - 1  # lengths and token ids are 32 bits wide on the device


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes of one worker."""

    role: Role
    max_model_len: int  # tokens
    page_size: int  # tokens
    num_usable_pages: int
    num_lookahead: int = 0
    vocab_size: int | None = None  # None = unknown: ids are only held to 32 bits
    eos_token_ids: tuple[int, ...] = ()
    read_tokens: int = 0  # KV one step may read; 0 = no bound

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits in the whole pool."""
        return self.page_size * self.num_usable_pages


def check_config(config: SchedulerConfig, *, role: Role, max_model_len: int, num_lookahead: int = 0) -> None:
    """Raise ConfigError for sizes with which no plan could ever be made, though each is within its flag's bounds."""
    if 0 < config.max_num_kv_read_tokens < LEAST_MODEL_LEN:
        raise ConfigError(
            f"max_num_kv_read_tokens is {config.max_num_kv_read_tokens}; use {LEAST_MODEL_LEN} or more, or 0 for no bound"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, and without chunked prefill one step computes up to "
            f"{max_model_len} tokens; use --max-num-batched-tokens {max_model_len}, or chunks"
        )
    rows = config.max_num_seqs * (1 + num_lookahead)
    if role is not Role.PREFILL and config.max_num_batched_tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, but {config.max_num_seqs} sequences decode {rows} "
            f"tokens a step; use --max-num-batched-tokens {rows} or more, or fewer --max-num-seqs"
        )


def check_request(request: EngineRequest, limits: Limits, *, knows_prompt: bool = False) -> None:
    """Raise InvalidRequest when the request could not run on an empty worker, ContextLengthExceeded when it is for its length;
    the message has the number to use.
    `knows_prompt`: the ids of its prompt were looked at before, which takes milliseconds of a long one."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no token; send at least one", field="prompt")
    if max_tokens < 0 or request.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"max_tokens is {max_tokens} with min_tokens {request.sampling.min_tokens}; use max_tokens >= min_tokens >= 0",
            field="max_tokens",
        )
    if len(request.generated_token_ids) > max_tokens:
        raise InvalidRequest(
            f"{len(request.generated_token_ids)} tokens are generated already, max_tokens is {max_tokens}", field="max_tokens"
        )
    _check_for_device(request, limits, () if knows_prompt else request.prompt_token_ids)
    if limits.role is Role.PREFILL:
        _check_known(limits.max_model_len, "the prefill worker's context length is", request)
        _check_known(limits.pool_tokens, "the prefill worker's KV pool holds", request)
        if limits.read_tokens:
            _check_known(limits.read_tokens, "one step of the prefill worker reads", request)
        return
    num_kv = num_prompt + max(0, max_tokens - 1) + limits.num_lookahead  # the last token's KV is never written
    _check_total(num_prompt + max_tokens, limits.max_model_len, "the model's context length is", request)
    _check_total(num_kv, limits.pool_tokens, "this worker's KV pool holds", request)
    if limits.read_tokens:
        _check_total(num_kv, limits.read_tokens, "one step of this worker reads", request)


def _check_for_device(request: EngineRequest, limits: Limits, prompt: tuple[int, ...]) -> None:
    """What a step cannot take. Edges check more; requests of other processes come past them, and one must not end them all."""
    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    bound = _MAX_INT32 if limits.vocab_size is None else limits.vocab_size
    for field, token_ids in (
        ("prompt", prompt),
        ("generated_token_ids", request.generated_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= bound):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < bound)
            raise InvalidRequest(f"{field}: ids must be in [0, {bound}), the model's vocabulary; got {wrong}", field=field)
    num_stops = len({*sampling.stop_token_ids, *limits.eos_token_ids})
    if num_stops > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: {num_stops} with the model's own; use at most {MAX_STOP_TOKEN_IDS}", field="stop_token_ids"
        )
    if num_prompt + sampling.max_tokens > _MAX_INT32:
        raise InvalidRequest(f"max_tokens: got {sampling.max_tokens}, use {_MAX_INT32 - num_prompt}", field="max_tokens")
    for field, wanted in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
            raise InvalidRequest(f"{field}: must be in [0, {MAX_LOGPROBS}]; got {wanted}", field=field)


def _check_total(total: int, limit: int, what: str, request: EngineRequest) -> None:
    """What is left of `limit` beyond the prompt is the max_tokens to use."""
    if total <= limit:
        return
    num_prompt = len(request.prompt_token_ids)
    spares = num_prompt < limit
    advice = f"use max_tokens <= {limit - num_prompt}" if spares else f"shorten the prompt to {limit - 1} tokens or fewer"
    raise ContextLengthExceeded(
        f"prompt of {num_prompt} tokens with max_tokens {request.sampling.max_tokens} needs room for "
        f"{total} tokens; {what} {limit} tokens: {advice}",
        field="max_tokens" if spares else "prompt",
    )


def _check_known(limit: int, what: str, request: EngineRequest) -> None:
    """Of a worker that computes what is known of the request, and needs no room for more. Of an answer that was begun nobody
    can take anything back."""
    if request.num_tokens <= limit:
        return
    text, advice = f"prompt of {len(request.prompt_token_ids)} tokens", f": shorten the prompt to {limit} tokens or fewer"
    if num_generated := len(request.generated_token_ids):
        text, advice = f"{text} with {num_generated} of its answer", ""
    raise ContextLengthExceeded(f"{text}; {what} {limit} tokens{advice}", field="prompt")
